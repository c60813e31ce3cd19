"""The ranks of one stage as one of them sees them: bytes to and from each, with deadlines.

It is a small pool of connections, one for each rank that this one talks with, opened once and used
for all that the two say to each other: the decisions of rank 0, and the chunks of collectives.
Both ends know from the order of the work what comes next, so nothing has to be told apart.

Only a rank's neighbours see that it is gone; all others find that a neighbour does not go on. So
who misses a rank says so to those that it talks with, in a *notice*, and these look for a moment
whether the rank that they miss itself misses another. The first byte of a frame tells the two
kinds: 0, then what was sent; 1, then the missing rank as u8 and how it was missed as UTF-8.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

import attrs

from mlxcel.errors import ChannelClosed, DeadlineError, MlxcelError, RankLost, WireError
from mlxcel.transport.contract import Connection
from mlxcel.wire.tensor import Buffer

DATA, NOTICE = b"\0", b"\1"

LISTEN_SECONDS = 1.0
"""How long a rank that misses another waits for a notice, at most; a quarter of its deadline."""

TELL_SECONDS = 0.5
"""How long all of a rank's notices may take; who does not read its own has other worries."""

CLOSED = "it has closed the connection"


@attrs.frozen
class _Lost:
    """Which rank is missed, and how; ``broken`` if this rank saw their connection end."""

    rank: int
    how: str
    broken: bool = False


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
        connections: By rank; the group closes them. Their ``stall`` should be ``timeout``.
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

    @property
    def room(self) -> int:
        """Bytes that each connection takes while its other end takes none."""
        return min((connection.room for connection in self._connections.values()), default=0)

    def send(self, rank: int, pieces: Sequence[Buffer], operation: str) -> None:
        """Send ``pieces`` as one frame to ``rank``.

        Args:
            operation: What for, for errors.

        Raises:
            RankLost: A rank is gone, or took nothing in time; the group is closed.
        """
        try:
            self._connections[rank].send((DATA, *pieces), self.timeout)
        except (ChannelClosed, DeadlineError) as error:
            # The other end may have left because it missed a third one, of which the rank before
            # this one has told.
            witness = (self.rank - 1) % self.size
            lost = self._missed(rank, error)
            raise self._lost(lost, witness if witness != rank else None, operation) from error

    def receive(self, rank: int, operation: str, *, idle: bool = False) -> memoryview:
        """The next frame from ``rank``.

        Args:
            operation: What for, for errors.
            idle: Whether it may take as long as the rank lives.

        Raises:
            RankLost: A rank is gone, or sent nothing in time; the group is closed.
            WireError: What came is no frame of a group; the group is closed.
        """
        try:
            frame = self._connections[rank].receive(None if idle else self.timeout)
        except DeadlineError as error:
            raise self._lost(self._missed(rank, error), rank, operation) from error
        except ChannelClosed as error:
            raise self._lost(self._missed(rank, error), None, operation) from error
        except WireError:
            self.close()
            raise
        if frame is None:
            raise self._lost(_Lost(rank, CLOSED, broken=True), None, operation)
        if frame[:1] == DATA:
            return frame[1:]
        try:
            lost = _read_notice(frame)
        except WireError:
            self.close()
            raise
        raise self._lost(lost, rank, operation)

    def close(self) -> None:
        """End all connections, which tells the other ranks; harmless when repeated."""
        for connection in self._connections.values():
            connection.close()

    def _missed(self, rank: int, error: ChannelClosed | DeadlineError) -> _Lost:
        if isinstance(error, DeadlineError):
            return _Lost(rank, f"nothing came through within {self.timeout:g} s")
        return _Lost(rank, error.reason or CLOSED, broken=True)

    def _lost(self, lost: _Lost, witness: int | None, operation: str) -> RankLost:
        """Find out which rank is really lost, tell the others, and leave.

        Args:
            lost: Which rank seems to be.
            witness: The rank that may know better.
        """
        until = time.monotonic() + min(LISTEN_SECONDS, self.timeout / 4)
        lost = self._hear(witness, 0.0) or lost  # a notice to one that is gone ends the connection
        self._tell(lost)
        # The witness closes when it knows no better, so mostly this takes no time.
        while said := self._hear(witness, until - time.monotonic()):
            lost = said
            self._tell(lost)
        self.close()
        return RankLost(self.stage, lost.rank, operation, lost.how, lost.broken)

    def _hear(self, witness: int | None, seconds: float) -> _Lost | None:
        """The notice that comes from ``witness`` in so many seconds, if any does."""
        if witness is None:
            return None
        until = time.monotonic() + seconds
        with contextlib.suppress(MlxcelError):
            while frame := self._connections[witness].receive(max(0.0, until - time.monotonic())):
                if frame[:1] == NOTICE:
                    return _read_notice(frame)
        return None

    def _tell(self, lost: _Lost) -> None:
        notice = NOTICE, bytes([lost.rank]), lost.how.encode()
        until = time.monotonic() + TELL_SECONDS
        for rank, connection in self._connections.items():
            if rank != lost.rank:
                with contextlib.suppress(MlxcelError):
                    connection.send(notice, max(0.0, until - time.monotonic()))


def _read_notice(frame: memoryview) -> _Lost:
    """Which rank is missed, and how."""
    if frame[:1] != NOTICE or len(frame) < 2:
        raise WireError("a frame between two ranks that is neither data nor a notice")
    try:
        return _Lost(frame[1], bytes(frame[2:]).decode())
    except UnicodeDecodeError:
        raise WireError("a rank's notice that is no text") from None
