"""The double whose ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import mlx.core as mx
import pytest

from mlxcel.errors import RankLost
from mlxcel.testing.thread_collectives import ThreadCollectives

T = TypeVar("T")


def together(
    group: tuple[ThreadCollectives, ...], call: Callable[[ThreadCollectives], T]
) -> list[T]:
    def run(rank: ThreadCollectives) -> T:
        try:
            return call(rank)
        finally:
            mx.clear_streams()

    with ThreadPoolExecutor(len(group)) as threads:
        futures = [threads.submit(run, rank) for rank in group]
        return [future.result(30) for future in futures]


def test_what_each_gets() -> None:
    """Every operation gives each rank what the protocol says."""

    def use(rank: ThreadCollectives) -> list[object]:
        x = mx.arange(6) * 10**rank.rank
        rank.barrier()
        results = [rank.all_sum(x), rank.all_gather(x), rank.reduce_scatter(x)]
        return [rank.size, *(r.tolist() for r in results), rank.broadcast(x, 1).tolist()]

    total = [111 * n for n in range(6)]
    every = [[n * 10**rank for n in range(6)] for rank in range(3)]
    assert together(ThreadCollectives.group(3), use) == [
        [3, total, every, total[2 * rank : 2 * rank + 2], every[1]] for rank in range(3)
    ]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_added_in_float32(dtype: mx.Dtype) -> None:
    """Small numbers beside a large one are not lost one by one."""

    def use(rank: ThreadCollectives) -> float:
        x = mx.array([256.0 if rank.rank == 0 else 0.75], dtype)
        return float(rank.all_sum(x).item())

    expected = mx.array(256 + 3 * 0.75).astype(dtype).item()
    assert together(ThreadCollectives.group(4), use) == [expected] * 4


def test_a_rank_that_does_not_come() -> None:
    """It is named when the deadline is over."""
    first, _ = ThreadCollectives.group(2, timeout=0.01)
    with pytest.raises(RankLost, match="rank 1 of stage 0 is lost in all_sum: it did not come"):
        first.all_sum(mx.array(1))


def test_a_rank_that_leaves() -> None:
    """The others learn it, whatever they call."""
    first, second = ThreadCollectives.group(2)
    second.close()
    second.close()
    for _ in range(2):
        with pytest.raises(RankLost, match=r"rank 1 .* in barrier: it has left"):
            first.barrier()


def test_ranks_that_do_different_things() -> None:
    """Both hear what the other one did instead."""

    def use(rank: ThreadCollectives) -> str:
        with pytest.raises(RankLost) as caught:
            rank.all_sum(mx.zeros(2)) if rank.rank else rank.all_gather(mx.zeros(3))
        return str(caught.value)

    assert [
        ("all_sum" in text, "all_gather" in text)
        for text in together(ThreadCollectives.group(2), use)
    ] == [(True, True)] * 2
