"""Collectives over ``mx.distributed``."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlxcel.errors import RankLost


class DistributedCollectives:
    """To be written."""

    def __init__(
        self,
        backend: str,
        rank: int,
        hosts: tuple[str, ...],
        stage: int,
        timeout: float,
        on_lost: Callable[[RankLost], None],
    ) -> None:
        raise NotImplementedError

    rank: int
    size: int

    def all_sum(self, x: mx.array) -> mx.array: ...
    def all_gather(self, x: mx.array) -> mx.array: ...
    def reduce_scatter(self, x: mx.array) -> mx.array: ...
    def broadcast(self, x: mx.array, root: int) -> mx.array: ...
    def barrier(self) -> None: ...
    def close(self) -> None: ...
