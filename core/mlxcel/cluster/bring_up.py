"""The three questions of a bring-up, without sockets and without a clock of its own.

Offer, commit, activate: the next question is asked when all peers have said yes to the one
before. If one does not, the error says what each of them said; whoever asks has to release all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from mlxcel.cluster.messages import (
    Accepted,
    Activate,
    Activated,
    Commit,
    Committed,
    Offer,
    Refused,
    ToCoordinator,
    ToPeer,
)
from mlxcel.errors import BringUpError, PeerFailure

Phase = Literal["offer", "commit", "activate"]

PHASES: tuple[Phase, ...] = ("offer", "commit", "activate")
_YES = {"offer": Accepted, "commit": Committed, "activate": Activated}
_Answer = Accepted | Committed | Activated

STRAGGLERS_SECONDS = 2.0
"""How long the others may still take to answer once one has said no."""

_LOOK = "Look at its standard error."


@attrs.frozen
class Send:
    """What is to be sent now, and to which peer."""

    peer: int
    message: ToPeer


class BringUp:
    """One bring-up as its coordinator sees it.

    Args:
        offers: What each peer is offered, by place.
        addresses: Where each peer is, for errors.
        patience: Seconds that the peers may take to answer one question.

    Attributes:
        phase: The question that is open.
        done: Whether all have answered all three.
        error: Why it failed; all peers must be released then.
        seconds: How long each question took.
    """

    def __init__(self, offers: Sequence[Offer], addresses: Sequence[str], patience: float) -> None:
        self.phase: Phase = "offer"
        self.done = False
        self.error: BringUpError | None = None
        self.seconds: dict[str, float] = {}
        self._offers = tuple(offers)
        self._session = self._offers[0].session
        self._addresses = tuple(addresses)
        self._patience = patience
        self._waiting: set[int] = set()
        self._failures: dict[int, PeerFailure] = {}
        self._fabric: dict[int, str] = {}
        self._began = 0.0
        self.deadline = 0.0
        """When to call :meth:`tick`, if nothing happens before."""

    @property
    def over(self) -> bool:
        """Whether nothing more is waited for."""
        return self.done or self.error is not None

    def begin(self, now: float) -> list[Send]:
        """Ask the first question."""
        return self._ask("offer", now)

    def receive(self, peer: int, message: ToCoordinator, now: float) -> list[Send]:
        """A peer has said something; what does not belong to this session is nothing."""
        if self.over or not isinstance(message, _Answer | Refused):
            return []
        if message.session != self._session or peer not in self._waiting:
            return []
        if isinstance(message, Refused):
            return self._fail(peer, message.reason, message.text, now)
        if not isinstance(message, _YES[self.phase]):
            said = f"it answered the {self.phase} with {type(message).__name__}."
            return self._fail(peer, "protocol", f"{said} Upgrade all nodes together.", now)
        if isinstance(message, Accepted):
            self._fabric[peer] = message.fabric
        self._waiting.discard(peer)
        return self._proceed(now)

    def lose(self, peer: int, why: str, now: float) -> list[Send]:
        """The connection to a peer has ended, or brought nonsense."""
        if self.over:
            return []
        return self._fail(peer, "lost", f"the connection ended: {why}. {_LOOK}", now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.over or now < self.deadline:
            return
        waited = now - self._began
        # Where one has said no, the others had less time than was theirs: that they are silent
        # means nothing.
        in_full = now >= self._began + self._patience
        for peer in sorted(self._waiting) if in_full else ():
            text = f"it did not answer the {self.phase} within {waited:.1f} s. {_LOOK}"
            self._note(peer, "silent", text)
        self._give_up()

    def _ask(self, phase: Phase, now: float) -> list[Send]:
        self.phase, self._began, self.deadline = phase, now, now + self._patience
        peers = range(len(self._offers))
        self._waiting = set(peers)
        if phase == "offer":
            return [Send(peer, self._offers[peer]) for peer in peers]
        if phase == "commit":
            return [Send(peer, Commit(self._session)) for peer in peers]
        return [Send(peer, Activate(self._session, self._fabric_of(peer))) for peer in peers]

    def _fabric_of(self, peer: int) -> tuple[str, ...]:
        """Where the ranks of a peer's stage said that their own connections are to be."""
        stage = self._offers[peer].stage
        ranks = [other for other, offer in enumerate(self._offers) if offer.stage == stage]
        return tuple(self._fabric[other] for other in ranks if self._fabric[other])

    def _proceed(self, now: float) -> list[Send]:
        if self._waiting:
            return []
        if self._failures:
            self._give_up()
            return []
        self.seconds[self.phase] = now - self._began
        if self.phase == "activate":
            self.done = True
            return []
        return self._ask(PHASES[PHASES.index(self.phase) + 1], now)

    def _fail(self, peer: int, reason: str, text: str, now: float) -> list[Send]:
        self._note(peer, reason, text)
        self._waiting.discard(peer)
        self.deadline = min(self.deadline, now + STRAGGLERS_SECONDS)
        return self._proceed(now)

    def _note(self, peer: int, reason: str, text: str) -> None:
        """The first thing that went wrong with a peer is what is told."""
        node, address = self._offers[peer].node, self._addresses[peer]
        self._failures.setdefault(peer, PeerFailure(node, address, reason, text))

    def _give_up(self) -> None:
        failures = tuple(failure for _, failure in sorted(self._failures.items()))
        self.error = BringUpError(self.phase, failures)
