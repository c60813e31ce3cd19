"""What the ranks of one stage do together where each is a process of its own.

All ranks call the same methods in the same order with arrays of the same shape and dtype. Each
call has a deadline; who misses it, or is gone, is named, and the group is over: no rank can go on
without the others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import mlx.core as mx


class Collectives(Protocol):
    """The collective operations of a group; all calls come from the thread that runs the stage.

    They may be lazy: what goes wrong may only be raised when their result is evaluated.

    Raises:
        RankLost: A rank did not take part in time, or is gone.
    """

    @property
    def rank(self) -> int:
        """This one."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def all_sum(self, x: mx.array) -> mx.array:
        """The sum of all ranks' ``x``. float16 and bfloat16 are added in float32."""
        ...

    def all_gather(self, x: mx.array) -> mx.array:
        """All ranks' ``x`` [...] one after the other: [size, ...]."""
        ...

    def reduce_scatter(self, x: mx.array) -> mx.array:
        """This rank's share of the sum of all ranks' ``x`` [size * n, ...]: [n, ...]."""
        ...

    def broadcast(self, x: mx.array, root: int) -> mx.array:
        """The ``x`` of the rank ``root``; of the others only shape and dtype count."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        ...

    def watched(self) -> AbstractContextManager[None]:
        """What evaluates lazy results, such as a step, runs within: so it has a deadline.

        When it is over, another thread is told; the one that hangs cannot be.

        Raises:
            RankLost: A rank is gone.
        """
        ...

    def close(self) -> None:
        """Leave the group; the others learn it. Harmless when repeated."""
