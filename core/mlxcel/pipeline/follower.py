"""The other ranks of a stage: they do what rank 0 says, with what their own link brings."""

from __future__ import annotations

from collections.abc import Callable

from mlxcel.errors import DeadlineError, RankLost, RanksDisagree
from mlxcel.pipeline.decision import StepDecision, decode
from mlxcel.pipeline.group import RankGroup
from mlxcel.pipeline.link import Inbox
from mlxcel.pipeline.step import Message, Step, Stop


class FollowingInbox:
    """The inbox of a rank that follows.

    Only the thread that runs the stage may receive: it also is the one that uses the group.

    Args:
        group: Rank 0 of it decides.
        own: The link from the equal rank of the stage before; None in the first stage, where
            decisions carry their steps.
    """

    def __init__(self, group: RankGroup, own: Inbox | None) -> None:
        self._group = group
        self._own = own

    @property
    def received(self) -> int:
        """See :meth:`mlxcel.pipeline.link.Inbox.received`; without a link, none."""
        return 0 if self._own is None else self._own.received

    def receive(self, timeout: float) -> Message:
        """What is to be run next; while rank 0 lives and is idle, so is this one.

        Raises:
            RankLost: Rank 0 is gone, or the equal rank of the stage before sent nothing in time.
            ChannelClosed: The stage before has ended.
            RanksDisagree: The own link brought another step than was decided.
            WireError: What rank 0 sent is no decision.
        """
        return self._follow(decode(self._group.receive(0, "the next decision", idle=True)))

    def poll(self) -> Message | None:
        """Nothing: decisions are waited for."""
        return None

    def listen(self, listener: Callable[[], None]) -> None:
        """Nothing, see :meth:`poll`."""

    def take_hops(self) -> tuple[float, ...]:
        """See :meth:`mlxcel.pipeline.link.Inbox.take_hops`."""
        return () if self._own is None else self._own.take_hops()

    def close(self, reason: str | None = None) -> None:
        """End the link and leave the group, which tells the other ranks."""
        if self._own is not None:
            self._own.close(reason)
        self._group.close()

    def _follow(self, decision: StepDecision) -> Message:
        if decision.kind == "shutdown":
            return Stop()
        group = self._group
        announced = f"step {decision.seq} ({decision.kind})"
        message = decision.step if self._own is None else self._take(self._own, announced)
        if not isinstance(message, Step):
            found = "nothing" if message is None else f"a {type(message).__name__}"
            raise RanksDisagree(group.stage, group.rank, announced, found)
        if message.seq != decision.seq:
            raise RanksDisagree(group.stage, group.rank, announced, f"step {message.seq}")
        return message

    def _take(self, own: Inbox, announced: str) -> Message:
        try:
            return own.receive(self._group.timeout)
        except DeadlineError as error:
            how = f"nothing came through within {self._group.timeout:g} s"
            before, rank = self._group.stage - 1, self._group.rank
            raise RankLost(before, rank, f"handing on {announced}", how) from error


class NoOutbox:
    """Where the ranks that follow in the last stage send: rank 0 answers for all."""

    def send(self, message: Message) -> None:
        """Drop ``message``."""

    def close(self, reason: str | None = None) -> None:
        """Nothing."""
