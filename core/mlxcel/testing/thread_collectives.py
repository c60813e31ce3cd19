"""Collectives of ranks that are threads of one process, for testing what uses them."""

from __future__ import annotations

import functools
import operator
import threading
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx

from mlxcel.errors import RankLost

STAGE = 0
"""The stage that errors name."""


class ThreadCollectives:
    """One rank of a group whose ranks are threads that meet.

    Nothing is lazy. A group is made by :meth:`group`; each rank belongs to one thread.
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self._rank = rank
        self._meeting = meeting

    @classmethod
    def group(cls, size: int, timeout: float = 30.0) -> tuple[ThreadCollectives, ...]:
        """All ranks of a group; each waits ``timeout`` seconds at most for the others."""
        meeting = _Meeting(size, timeout)
        return tuple(cls(rank, meeting) for rank in range(size))

    @property
    def rank(self) -> int:
        """This one."""
        return self._rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._meeting.size

    def all_sum(self, x: mx.array) -> mx.array:
        """The sum of all ranks' ``x``. float16 and bfloat16 are added in float32."""
        parts = self._exchange("all_sum", x)
        if x.dtype in (mx.float16, mx.bfloat16):
            parts = [part.astype(mx.float32) for part in parts]
        return functools.reduce(operator.add, parts).astype(x.dtype)

    def all_gather(self, x: mx.array) -> mx.array:
        """All ranks' ``x`` [...] one after the other: [size, ...]."""
        return mx.stack(self._exchange("all_gather", x))

    def reduce_scatter(self, x: mx.array) -> mx.array:
        """This rank's share of the sum of all ranks' ``x`` [size * n, ...]: [n, ...]."""
        return mx.split(self.all_sum(x), self.size)[self._rank]

    def broadcast(self, x: mx.array, root: int) -> mx.array:
        """The ``x`` of the rank ``root``."""
        return self._exchange("broadcast", x)[root]

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._exchange("barrier", mx.array(0))

    def watched(self) -> AbstractContextManager[None]:
        """Every wait has a deadline of its own."""
        return nullcontext()

    def close(self) -> None:
        """Leave the group; the others learn it."""
        self._meeting.leave(self._rank)

    def _exchange(self, operation: str, x: mx.array) -> list[mx.array]:
        mx.eval(x)  # only evaluated arrays may go to other threads
        return self._meeting.exchange(self._rank, operation, x)


class _Meeting:
    """Where ``size`` threads bring an array each and get all of them."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self._timeout = timeout
        self._brought: list[tuple[str, mx.array] | None] = [None] * size
        self._gone: set[int] = set()
        self._all_here = threading.Barrier(size)
        self._all_taken = threading.Barrier(size)

    def exchange(self, rank: int, operation: str, x: mx.array) -> list[mx.array]:
        """What every rank brings to ``operation``.

        Raises:
            RankLost: One has left, brings something to another operation, or does not come.
        """
        self._brought[rank] = (operation, x)
        self._meet(self._all_here, operation)
        brought = [each for each in self._brought if each is not None]
        for other, (name, array) in enumerate(brought):
            if (name, array.shape, array.dtype) != (operation, x.shape, x.dtype):
                how = f"it calls {name} with {array.dtype} {array.shape}, rank {rank} does not"
                raise RankLost(STAGE, other, operation, how)
        self._meet(self._all_taken, operation)
        self._brought[rank] = None
        return [array for _, array in brought]

    def leave(self, rank: int) -> None:
        """From now on no exchange succeeds."""
        self._gone.add(rank)
        self._all_here.abort()

    def _meet(self, barrier: threading.Barrier, operation: str) -> None:
        try:
            barrier.wait(self._timeout)
        except threading.BrokenBarrierError:
            absent = (rank for rank, each in enumerate(self._brought) if each is None)
            if self._gone:
                raise RankLost(STAGE, min(self._gone), operation, "it has left") from None
            how = f"it did not come within {self._timeout:g} s"
            raise RankLost(STAGE, next(absent, 0), operation, how) from None
