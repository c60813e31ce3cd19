"""Rank 0 of a stage: what comes to it, it has the other ranks do too."""

from __future__ import annotations

from collections.abc import Callable

from mlxcel.errors import RanksDisagree
from mlxcel.pipeline.decision import decide, pieces
from mlxcel.pipeline.group import RankGroup
from mlxcel.pipeline.link import Inbox
from mlxcel.pipeline.step import Message, Step, Stop


class LeadingInbox:
    """The inbox of rank 0; of each message the group is told before it is handed out.

    Only the thread that runs the stage may receive: it also is the one that uses the group.

    Args:
        inner: The link from the engine or from rank 0 of the stage before.
        carry: Whether the other ranks have no link of their own to take a step from.
    """

    def __init__(self, inner: Inbox, group: RankGroup, *, carry: bool) -> None:
        self._inner = inner
        self._group = group
        self._carry = carry

    @property
    def received(self) -> int:
        """See :meth:`mlxcel.pipeline.link.Inbox.received`."""
        return self._inner.received

    def receive(self, timeout: float) -> Message:
        """The next message, which all ranks run.

        Raises:
            ChannelClosed, DeadlineError: See :meth:`mlxcel.pipeline.link.Inbox.receive`.
            RankLost: A rank could not be told.
            RanksDisagree: It is nothing that ranks can run.
        """
        return self._tell(self._inner.receive(timeout))

    def poll(self) -> Message | None:
        """See :meth:`mlxcel.pipeline.link.Inbox.poll`, and :meth:`receive`."""
        message = self._inner.poll()
        return None if message is None else self._tell(message)

    def listen(self, listener: Callable[[], None]) -> None:
        """See :meth:`mlxcel.pipeline.link.Inbox.listen`."""
        self._inner.listen(listener)

    def take_hops(self) -> tuple[float, ...]:
        """See :meth:`mlxcel.pipeline.link.Inbox.take_hops`."""
        return self._inner.take_hops()

    def close(self, reason: str | None = None) -> None:
        """End the link and leave the group, which tells the other ranks."""
        self._inner.close(reason)
        self._group.close()

    def _tell(self, message: Message) -> Message:
        group = self._group
        if not isinstance(message, Step | Stop):
            # A step fails in the last stage alone; elsewhere a failure ends the stage.
            raise RanksDisagree(group.stage, group.rank, "a step", f"a {type(message).__name__}")
        decision = decide(message, carry=self._carry)
        frame = pieces(decision)
        for rank in range(1, group.size):
            group.send(rank, frame, f"the decision to {decision.kind}")
        return message
