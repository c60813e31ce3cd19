"""Collectives over ``mx.distributed``: the backends that MLX itself has.

They are for fabrics that one trusts: nothing is encrypted, and nobody has to prove who they are.
Their results are lazy. MLX waits for other ranks without a deadline, so a watchdog has one: what
evaluates results does so within :meth:`DistributedCollectives.watched`.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import NamedTemporaryFile

import mlx.core as mx

from mlxcel.errors import RankLost, UsageError
from mlxcel.tensor.watchdog import Watchdog

BACKENDS = ("ring", "jaccl", "mpi", "nccl")

CONNECT_SECONDS = 30.0
"""How long connecting may take at least: MLX tries again and again, ever more seldom."""


class DistributedCollectives:
    """See :class:`mlxcel.tensor.collectives.Collectives`.

    Args:
        backend: One of :data:`BACKENDS`. ``ring`` connects the ``hosts``; the others take what
            they need from the environment, where ``mlx.launch`` or the operator puts it.
        rank: This one.
        hosts: The address of each rank, ``IP:port``.
        stage: The ranks' stage, for errors.
        timeout: Seconds that each evaluation may take.
        on_lost: Called in another thread when one takes longer. The thread that evaluates stays
            where it is, so this process has to say so and end.

    Raises:
        UsageError: This build of MLX has no such backend, or its environment says something
            else than ``rank`` and ``hosts``.
        RankLost: The ranks do not come together, as far as MLX notices; it may wait for ever,
            and does so without letting go of Python's lock. Then this process ends.
    """

    def __init__(
        self,
        backend: str,
        rank: int,
        hosts: tuple[str, ...],
        stage: int,
        timeout: float,
        on_lost: Callable[[RankLost], None],
    ) -> None:
        check_backend(backend)
        self.rank = rank
        self.size = len(hosts)
        self._backend = backend
        self._stage = stage
        self._count = 0
        self._watchdog = Watchdog(
            timeout,
            lambda operation: on_lost(
                self._lost(operation, f"it was not over within {timeout:g} s")
            ),
        )
        self._watchdog.operation = "connecting"
        with self._named(), _ended_after(max(timeout, CONNECT_SECONDS)):
            self._group = _ring(rank, hosts) if backend == "ring" else _group(backend)
        self._check_group(hosts)

    def all_sum(self, x: mx.array) -> mx.array:
        """See :meth:`Collectives.all_sum`."""
        self._next("all-reduce")
        return mx.distributed.all_sum(x, group=self._group)

    def all_gather(self, x: mx.array) -> mx.array:
        """See :meth:`Collectives.all_gather`."""
        self._next("all-gather")
        return mx.distributed.all_gather(x[None], group=self._group)

    def reduce_scatter(self, x: mx.array) -> mx.array:
        """See :meth:`Collectives.reduce_scatter`; the ring makes the whole sum.

        Raises:
            ValueError: The first dimension cannot be divided by the ranks.
        """
        rows, rest = divmod(x.shape[0], self.size) if x.ndim else (0, 1)
        if rest:
            raise ValueError(f"{self.size} ranks cannot share an array of shape {x.shape}")
        self._next("reduce-scatter")
        if self._backend != "ring":
            return mx.distributed.sum_scatter(x, group=self._group)
        whole = mx.distributed.all_sum(x, group=self._group)
        return whole[self.rank * rows : (self.rank + 1) * rows]

    def broadcast(self, x: mx.array, root: int) -> mx.array:
        """See :meth:`Collectives.broadcast`; MLX has none, so all arrays are gathered."""
        self._next("broadcast")
        return mx.distributed.all_gather(x[None], group=self._group)[root]

    def barrier(self) -> None:
        """See :meth:`Collectives.barrier`.

        Raises:
            RankLost: A rank is gone.
        """
        self._next("barrier")
        with self.watched():
            mx.eval(mx.distributed.all_sum(mx.zeros(1), group=self._group))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See :meth:`Collectives.watched`."""
        with self._watchdog.watching(), self._named():
            yield

    def close(self) -> None:
        """Stop watching; MLX's connections end with the process."""
        self._watchdog.close()

    def _next(self, operation: str) -> None:
        self._count += 1
        self._watchdog.operation = f"{operation} {self._count}"

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Tell errors of the backend from others, which MLX does not."""
        try:
            yield
        except RuntimeError as error:
            if f"[{self._backend}]" not in str(error):
                raise
            raise self._lost(self._watchdog.operation, str(error)) from error

    def _lost(self, operation: str, how: str) -> RankLost:
        # Of two it is the other one. MLX does not say which of more; most wait for the one before.
        doubt = "" if self.size == 2 else " - of which rank is lost this one is not sure"
        return RankLost(
            self._stage,
            (self.rank - 1) % max(self.size, 2),
            f"{operation} over {self._backend}",
            f"{how}, says rank {self.rank}{doubt}",
        )

    def _check_group(self, hosts: Sequence[str]) -> None:
        rank, size = self._group.rank(), self._group.size()
        if (rank, size) != (self.rank, len(hosts)):
            raise UsageError(
                f"--tp-collectives {self._backend}: MLX takes this process for rank {rank} of "
                f"{size}, but it is rank {self.rank} of {len(hosts)}.",
                "Set the environment that the backend wants in each rank's process, or use "
                "--tp-collectives transport.",
            )


def check_backend(backend: str) -> None:
    """See whether MLX has ``backend`` here.

    Raises:
        UsageError: It has not.
    """
    if backend in BACKENDS and mx.distributed.is_available(backend):
        return
    there = [name for name in BACKENDS if mx.distributed.is_available(name)]
    raise UsageError(
        f"--tp-collectives {backend}: MLX has no such backend here.",
        f"There {'is' if len(there) == 1 else 'are'} {', '.join(there)}, and transport, which "
        f"needs none of them."
        if there
        else "Use --tp-collectives transport, which needs none.",
    )


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End the process with a traceback if this takes longer, though no thread of Python can run."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _ring(rank: int, hosts: Sequence[str]) -> mx.distributed.Group:
    """MLX's ring, which wants a file with the addresses of each rank."""
    with NamedTemporaryFile("w", prefix="mlxcel-ring-", suffix=".json") as file:  # mode 0600
        json.dump([[host] for host in hosts], file)
        file.flush()
        os.environ |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": file.name}
        return _group("ring")


def _group(backend: str) -> mx.distributed.Group:
    return mx.distributed.init(strict=True, backend=backend)
