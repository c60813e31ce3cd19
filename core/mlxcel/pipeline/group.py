"""The ranks of one stage as one of them sees them: bytes to and from each, with deadlines.

It is a small pool of connections, one for each rank that this one talks with, opened once and used
for all that the two say to each other: the decisions of rank 0, and the chunks of collectives.
Both ends know from the order of the work what comes next, so nothing has to be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxcel.errors import ChannelClosed, DeadlineError, RankLost
from mlxcel.transport.contract import Connection
from mlxcel.wire.tensor import Buffer


def group_peers(rank: int, size: int) -> tuple[int, ...]:
    """The ranks that ``rank`` of ``size`` has a connection with, ascending.

    These are its neighbours in the ring and, for the decisions, rank 0; for rank 0 all. Of each
    pair, the lower one makes the connection.
    """
    if rank == 0:
        return tuple(range(1, size))
    return tuple(sorted({0, (rank - 1) % size, (rank + 1) % size} - {rank}))


class RankGroup:
    """See the module; all calls come from the thread that runs the stage.

    Args:
        stage: The stage that the ranks share.
        rank, size: This rank, and how many there are.
        connections: By rank; the group closes them.
        timeout: Seconds that any one wait may last, if nothing else is said.
    """

    def __init__(
        self,
        stage: int,
        rank: int,
        size: int,
        connections: Mapping[int, Connection],
        timeout: float,
    ) -> None:
        self.stage = stage
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._connections = dict(connections)

    def send(self, rank: int, pieces: Sequence[Buffer], operation: str) -> None:
        """Send ``pieces`` as one frame to ``rank``.

        Args:
            operation: What for, for errors.

        Raises:
            RankLost: It is gone, or took nothing in time.
        """
        try:
            self._connections[rank].send(pieces, self.timeout)
        except (ChannelClosed, DeadlineError) as error:
            raise self._lost(rank, operation, error) from error

    def receive(self, rank: int, operation: str, *, idle: bool = False) -> memoryview:
        """The next frame from ``rank``.

        Args:
            operation: What for, for errors.
            idle: Whether it may take as long as the rank lives.

        Raises:
            RankLost: It is gone, or sent nothing in time.
        """
        try:
            frame = self._connections[rank].receive(None if idle else self.timeout)
        except (ChannelClosed, DeadlineError) as error:
            raise self._lost(rank, operation, error) from error
        if frame is None:
            raise RankLost(self.stage, rank, operation, "it has closed the connection")
        return frame

    def close(self) -> None:
        """End all connections, which tells the other ranks; harmless when repeated."""
        for connection in self._connections.values():
            connection.close()

    def _lost(self, rank: int, operation: str, error: ChannelClosed | DeadlineError) -> RankLost:
        if isinstance(error, DeadlineError):
            how = f"nothing came through within {self.timeout:g} s"
        else:
            how = error.reason or "the connection is closed"
        return RankLost(self.stage, rank, operation, how)
