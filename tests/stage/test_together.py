"""The blocks of several ranks in the place of one, and how their results come together."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxcel.family.in_step import Steps
from mlxcel.stage.rank_caches import RankCaches
from mlxcel.stage.together import Joint, Shared, Together
from mlxcel.testing.thread_collectives import ThreadCollectives


class Times(nn.Module):
    """A block that multiplies, and remembers what it was called with."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.seen: Any = None

    def __call__(self, x: mx.array, cache: Any = None, keys: Any = None) -> mx.array:
        self.seen = (cache, keys)
        return x * self.factor


class WithKeys(Times):
    """One that also returns something of its own, and something that is the same for all."""

    def __call__(self, x: mx.array, cache: Any = None, keys: Any = None) -> Any:
        return super().__call__(x, cache, keys), f"keys of {self.factor}", 7


class Normed(Times):
    """One that divides by what all ranks have, amid its work."""

    def in_step(self, x: mx.array) -> Steps:
        part = x * self.factor
        total = yield part
        return part / total


def on_threads(size: int, call: Any) -> list[Any]:
    """What ``call`` of each rank's collectives returns, each in its own thread."""

    def run(rank: ThreadCollectives) -> Any:
        try:
            result = call(rank)
            mx.eval(result)
            return result
        finally:
            mx.clear_streams()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, ThreadCollectives.group(size)))


def test_results_are_added() -> None:
    """One graph over all ranks; to whoever reads attributes it is the first."""
    together = Together([Times(2), Times(3)], Joint(range(2), None))
    assert together(mx.array([1, 10])).tolist() == [5, 50]
    assert together.factor == 2
    with pytest.raises(AttributeError):
        together.no_such_thing  # noqa: B018


def test_each_rank_has_its_own_arguments() -> None:
    """Of caches and of what came from another block, each gets its own; other things all get."""
    blocks = [Times(2), Times(3)]
    together = Together(blocks, Joint(range(2), None))
    together(mx.array(1), RankCaches(["a", "b"]), keys=Shared(["c", "d"]))
    assert [block.seen for block in blocks] == [("a", "c"), ("b", "d")]
    together(mx.array(1), keys="same")
    assert [block.seen for block in blocks] == [(None, "same")] * 2


def test_tuples() -> None:
    """The first item is added, the second stays each rank's own, the others are the same."""
    total, own, same = Together([WithKeys(2), WithKeys(3)], Joint(range(2), None))(mx.array(10))
    assert (total.item(), list(own), same) == (50, ["keys of 2", "keys of 3"], 7)
    assert isinstance(own, Shared)
    alone = Together([WithKeys(2)], Joint(range(1), None))(mx.array(10))
    assert (alone[0].item(), *alone[1:]) == (20, "keys of 2", 7)


def test_blocks_that_run_in_step() -> None:
    """What they add up amid their work is the sum over all ranks, in one graph or in many."""
    together = Together([Normed(2), Normed(3)], Joint(range(2), None))
    assert together(mx.array([1.0, 10.0])).tolist() == [1, 1]

    def run(rank: ThreadCollectives) -> mx.array:
        joint = Joint(range(rank.rank, rank.rank + 1), rank)
        return Together([Normed(1 + rank.rank)], joint)(mx.array([1.0, 10.0]))

    assert [r.tolist() for r in on_threads(3, run)] == [[1, 1]] * 3


def test_collectives_add_what_the_others_have() -> None:
    """Where each rank is a worker of its own, every one gets the same sum."""

    def run(rank: ThreadCollectives) -> mx.array:
        joint = Joint(range(rank.rank, rank.rank + 1), rank)
        assert joint.size == 3
        return Together([Times(10**rank.rank)], joint)(mx.array([1, 2]))

    assert [r.tolist() for r in on_threads(3, run)] == [[111, 222]] * 3


@pytest.mark.parametrize("total", [6, 7, 8])
def test_side_by_side(total: int) -> None:
    """Shares of an axis that need not divide come in the order of ranks, as in one graph."""
    whole = mx.arange(2 * total).reshape(2, total)
    starts = [rank * total // 3 for rank in range(4)]
    parts = [whole[:, a:b] for a, b in itertools.pairwise(starts)]
    mx.eval(parts)
    assert Joint(range(3), None).side_by_side(parts, total).tolist() == whole.tolist()

    def run(rank: ThreadCollectives) -> mx.array:
        joint = Joint(range(rank.rank, rank.rank + 1), rank)
        return joint.side_by_side([parts[rank.rank]], total)

    assert [r.tolist() for r in on_threads(3, run)] == [whole.tolist()] * 3
