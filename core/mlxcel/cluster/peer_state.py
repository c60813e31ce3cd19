"""What a peer does next: its states, without sockets, processes or a clock of its own.

A peer waits; a coordinator connects; its offer is judged and accepted; all have accepted, and it
commits; all have committed, and it activates: the stage starts, and runs when its links are made.
Whatever goes wrong on the way, the peer ends the session and waits again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs

from mlxcel.cluster.handshake import Accept, Refuse, Verdict
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.messages import (
    Accepted,
    Activate,
    Activated,
    Commit,
    Committed,
    Offer,
    Ping,
    Refused,
    Release,
    Reported,
    ToCoordinator,
    ToPeer,
)
from mlxcel.errors import DeadlineError, WorkerFailed
from mlxcel.pipeline.report import Beat, Ended, Failed, Loaded, Loading

State = Literal["waiting", "connected", "judging", "offered", "committed", "starting", "active"]

PATIENCE = 30.0
"""Seconds that the coordinator may take between two questions, and all nodes to make the links."""

_LOOK = "Look at their standard error, and that no firewall keeps the peers apart."
_IN_SESSION = ("offered", "committed", "starting", "active")


@attrs.frozen
class Send:
    """Tell the coordinator."""

    message: ToCoordinator


@attrs.frozen
class Judge:
    """Look whether the offer can be met, and say so with :meth:`PeerState.judged`."""

    offer: Offer


@attrs.frozen
class Start:
    """Write the TOML and make the links that this node dials.

    :meth:`PeerState.written` and :meth:`PeerState.linked` take what comes of it.
    """

    offer: Offer


@attrs.frozen
class Run:
    """Give the worker its job and its links.

    ``folder`` has the checkpoint; ``fabric`` is as in :class:`Activate`.
    """

    offer: Offer
    folder: Path
    fabric: tuple[str, ...] = ()


@attrs.frozen
class Abandon:
    """End the session: close its links, and its stage if it was ``started``."""

    offer: Offer
    reason: str
    started: bool


@attrs.frozen
class HangUp:
    """Close the control connection."""


@attrs.frozen
class Log:
    """A line for the operator."""

    text: str


Effect = Send | Judge | Start | Run | Abandon | HangUp | Log


@attrs.define
class PeerState:
    """The peer's side of a bring-up and of the run that follows.

    Args:
        cluster: The name of the cluster that it belongs to.
        grace: Seconds of silence after which the coordinator counts as lost.
        now: Seconds of a monotonic clock, as everywhere here.
        patience: Seconds that a step of the bring-up may take.

    Attributes:
        state: Where it is.
        coordinator: The address of the connected coordinator; empty if there is none.
        offer: What it is held to, or about to be.
        sessions: How many stages it has started.
        broken_links: How many of them ended because a data link broke, or brought frames that
            were forged, damaged or out of order.
    """

    cluster: str
    grace: float
    _ticked: float = attrs.field(alias="now")
    patience: float = PATIENCE
    state: State = attrs.field(default="waiting", init=False)
    coordinator: str = attrs.field(default="", init=False)
    offer: Offer | None = attrs.field(default=None, init=False)
    sessions: int = attrs.field(default=0, init=False)
    broken_links: int = attrs.field(default=0, init=False)
    _folder: Path | None = attrs.field(default=None, init=False)
    _fabric: tuple[str, ...] = attrs.field(default=(), init=False)
    _heard: float = attrs.field(default=0.0, init=False)
    _deadline: float | None = attrs.field(default=None, init=False)
    _links: set[str] = attrs.field(factory=set, init=False)
    _written: bool = attrs.field(default=False, init=False)
    _goodbye: bool = attrs.field(default=False, init=False)

    # Who comes in.

    def verdict(self, dialer: Introduction) -> Verdict:
        """Whether a dialer that knows the secret is welcome."""
        if dialer.cluster != self.cluster:
            return Refuse(
                f"this peer belongs to the cluster {self.cluster!r}, not {dialer.cluster!r}. "
                f"Give all nodes one --cluster-name."
            )
        if dialer.purpose.kind == "data":
            return self._verdict_on_link(dialer)
        if dialer.role != "coordinator":
            return Refuse("only a coordinator can take a peer into its cluster.")
        if self.coordinator:
            return Refuse(
                f"it is busy with the session of {self.coordinator}. Stop that coordinator first, "
                f"or use other peers."
            )
        return Accept()

    def _verdict_on_link(self, dialer: Introduction) -> Verdict:
        purpose = dialer.purpose
        if (
            self.offer is None
            or self.state not in _IN_SESSION
            or purpose.session != self.offer.session
        ):
            return Refuse("it is in no session of that name. Start the coordinator again.")
        awaited = {link.name: link for link in self.offer.links if link.to is None}
        link = awaited.get(purpose.link)
        if link is None or purpose.link in self._links or purpose.traffic != link.traffic:
            return Refuse(f"it waits for no link {purpose.link!r}. Start the coordinator again.")
        return Accept()

    def connected(self, address: str, now: float) -> list[Effect]:
        """A coordinator's control connection is there; there must be no other."""
        assert not self.coordinator, "the verdict looks after that"
        self.state, self.coordinator, self._heard = "connected", address, now
        return [Log(f"the coordinator at {address} has connected")]

    def linked(self, link: str) -> list[Effect]:
        """One of the session's links is made, from whichever end."""
        self._links.add(link)
        return self._proceed()

    # What the coordinator says.

    def receive(self, message: ToPeer, now: float) -> list[Effect]:
        """The coordinator has said something. Pings are for whoever has the clock to answer."""
        self._heard = now
        match message:
            case Ping():
                return []
            case Offer() if self.state == "connected":
                self.state, self.offer = "judging", message
                return [Judge(message)]
            case Offer():
                text = "it has been offered a stage already. Start the coordinator again."
                return [Send(Refused(message.session, "busy", text))]
        if self.offer is None or message.session != self.offer.session:
            return []
        match message:
            case Commit() if self.state == "offered":
                self.state, self._deadline = "committed", now + self.patience
                return [Send(Committed(message.session))]
            case Activate(fabric=fabric) if self.state == "committed":
                self.state, self._deadline = "starting", now + self.patience
                self._fabric = fabric
                self.sessions += 1
                return [Start(self.offer)]
            case Release(reason=reason):
                return self._abandon(reason)
        name = type(message).__name__
        return [*self._abandon(f"a {name} out of turn"), HangUp()]

    def judged(
        self, offer: Offer, verdict: Path | Refused, now: float, fabric: str = ""
    ) -> list[Effect]:
        """The offer has been looked at: the checkpoint's folder, or a refusal.

        Args:
            fabric: See :class:`Accepted`.
        """
        if self.state != "judging" or offer is not self.offer:
            return []  # it has been withdrawn meanwhile
        if isinstance(verdict, Refused):
            self.state, self.offer = "connected", None
            return [Send(verdict), Log(f"refused an offer ({verdict.reason}): {verdict.text}")]
        self.state, self._folder, self._deadline = "offered", verdict, now + self.patience
        layers = f"layers {offer.start}-{offer.stop - 1}"
        return [
            Send(Accepted(offer.session, fabric)),
            Log(f"accepted to be {offer.long_title}: {layers} of {verdict}"),
        ]

    def written(self, offer: Offer, problem: str | None) -> list[Effect]:
        """The TOML has been written, or could not be because of ``problem``."""
        if self.state != "starting" or offer is not self.offer:
            return []
        if problem is not None:
            refusal = Refused(offer.session, "config", problem)
            return [Send(refusal), *self._abandon(problem)]
        self._written = True
        return [Send(Activated(offer.session)), *self._proceed()]

    def lost(self, why: str) -> list[Effect]:
        """The control connection is gone."""
        if not self.coordinator:
            return []
        effects = self._abandon(f"the coordinator at {self.coordinator} is gone: {why}")
        if not effects:
            effects = [Log(f"the coordinator at {self.coordinator} has left: {why}")]
        self.state, self.coordinator, self.offer = "waiting", "", None
        return effects

    # What the worker says.

    def reported(self, report: Loading | Loaded | Failed | Ended | Beat) -> list[Effect]:
        """The worker of the session says something."""
        offer = self.offer
        if offer is None or self.state not in ("starting", "active"):
            return []
        effects: list[Effect] = [Send(Reported(offer.session, report))]
        match report:
            case Loaded(_, size, seconds):
                text = f"ready as {offer.title}: {size} bytes in {seconds:.1f} s"
                effects.append(Log(text))
            case Failed(_, error):
                self._goodbye = True
                words = error.text if isinstance(error, WorkerFailed) else error
                effects.append(Log(f"{offer.title} has failed: {words}"))
            case Ended(cut=cut):
                self._goodbye = True
                if cut:
                    self.broken_links += 1
                    effects.append(Log(f"a data link is broken: {cut}"))
        return effects

    def failed(self, error: Exception) -> list[Effect]:
        """The worker, or what should have become its links, is gone."""
        if self.offer is None or self._goodbye:
            return []
        return self.reported(Failed(self.offer.stage, error, self.offer.rank))

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Time has passed; call it a few times within the grace.

        Time in which nobody called it (this process was stopped, the machine slept) is not held
        against the coordinator.
        """
        asleep = max(0.0, now - self._ticked - self.grace / 2)
        self._ticked = now
        if not self.coordinator:
            return []
        self._heard += asleep
        if (silent := now - self._heard) > self.grace:
            return [*self.lost(f"no sign of life for {silent:.1f} s"), HangUp()]
        if self._deadline is None:
            return []
        self._deadline += asleep
        if now <= self._deadline:
            return []
        waited = {"offered": "no commit", "committed": "no activation"}.get(self.state)
        if waited is not None:
            why = f"{waited} within {self.patience:g} s"
            return [*self._abandon(why), HangUp()]
        self._deadline = None
        missing = f"the links {', '.join(sorted(self._missing()))}"
        return self.failed(DeadlineError("the neighbours", missing, self.patience, _LOOK))

    def _missing(self) -> set[str]:
        links = () if self.offer is None else self.offer.links
        return {link.name for link in links} - self._links

    def _proceed(self) -> list[Effect]:
        """The stage runs when the TOML is written and all its links are made.

        Where others make all of them, they may be there first.
        """
        if self.state != "starting" or not self._written or self._missing() or self.offer is None:
            return []
        assert self._folder is not None, "judged() has set it"
        self.state, self._deadline = "active", None
        run = Run(self.offer, self._folder, self._fabric)
        return [run, Log(f"loading as {self.offer.title}")]

    def _abandon(self, reason: str) -> list[Effect]:
        """End the session, if there is any; the coordinator stays connected."""
        offer, started = self.offer, self.state in ("starting", "active")
        self.state, self.offer, self._folder = "connected", None, None
        self._deadline, self._goodbye = None, False
        self._written = False
        self._links.clear()
        if offer is None:
            return []
        return [Abandon(offer, reason, started), Log(f"released: {reason}")]
