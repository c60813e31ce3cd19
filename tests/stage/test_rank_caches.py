"""The caches of several ranks as one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlxcel.stage.rank_caches import RankCaches

RANKS = 3


def feed(cache: Any, seed: int, length: int) -> None:
    """Let ``cache`` keep ``length`` positions of one row, other ones for each ``seed``."""
    values = mx.array(np.random.default_rng(seed).standard_normal((1, 2, length, 4)))
    if isinstance(cache, ArraysCache):
        cache[0] = values[:, 0]
    else:
        cache.update_and_fetch(values, values + 1)


def states(caches: list[Any]) -> list[Any]:
    return [[(k, np.array(v).tolist()) for k, v in tree_flatten(cache.state)] for cache in caches]


MAKE: dict[str, Callable[[], Any]] = {
    "kv": KVCache,
    "rotating": lambda: RotatingKVCache(max_size=8),
    "arrays": lambda: ArraysCache(1),
}


@pytest.fixture(params=MAKE)
def make(request: pytest.FixtureRequest) -> Callable[..., tuple[list[Any], RankCaches]]:
    """Makes one row's cache for each rank, plain ones and the same together."""

    def make(seed: int, length: int) -> tuple[list[Any], RankCaches]:
        plain = [MAKE[request.param]() for _ in range(RANKS)]
        for rank, cache in enumerate(plain):
            feed(cache, 10 * seed + rank, length)
        return plain, RankCaches(copy.deepcopy(plain))

    return make


def test_every_batch_operation(make: Callable[..., tuple[list[Any], RankCaches]]) -> None:
    """It does to each rank's cache what it does to that cache alone."""
    rows = [make(seed, 4) for seed in range(3)]
    merged = rows[0][1].merge([caches for _, caches in rows[:2]])
    alone = [rows[0][0][r].merge([plain[r] for plain, _ in rows[:2]]) for r in range(RANKS)]
    assert states(merged.each) == states(alone)

    other, more = rows[2][1].merge([rows[2][1]]), [c.merge([c]) for c in rows[2][0]]
    merged.extend(other)
    for mine, theirs in zip(alone, more, strict=True):
        mine.extend(theirs)
    assert states(merged.each) == states(alone)

    merged.filter([2, 0])
    for cache in alone:
        cache.filter([2, 0])
    assert states(merged.each) == states(alone)

    extracted = [cache.extract(1) for cache in alone]
    assert states(merged.extract(1).each) == states(extracted)
    assert merged.nbytes == sum(cache.nbytes for cache in alone)
    assert len(merged.state) == RANKS


def test_padding() -> None:
    """Padded prompts move to the right side of every rank's batch."""
    batches = []
    for _ in range(RANKS):
        single = KVCache()
        batches.append(single.merge([KVCache(), KVCache()]))
    together = RankCaches(copy.deepcopy(batches))
    for cache in (together, *batches):
        cache.prepare(lengths=[3, 1], right_padding=[0, 2])
    for rank in range(RANKS):
        values = mx.array(np.random.default_rng(rank).standard_normal((2, 2, 3, 4)))
        for cache in (together.each[rank], batches[rank]):
            cache.update_and_fetch(values, values)
    for cache in (together, *batches):
        cache.finalize()
        cache.trim(1)
    assert states(together.each) == states(batches)


def test_copies_are_independent() -> None:
    """Ranks that begin with one empty cache keep their own; a copy keeps what it had."""
    empty = RankCaches([KVCache()] * RANKS)
    first, second = copy.deepcopy(empty), copy.deepcopy(empty)
    for rank, cache in enumerate(first.each):
        feed(cache, rank, 2 + rank)
    assert [cache.offset for cache in first.each] == [2, 3, 4]
    assert [cache.offset for cache in (*second.each, *empty.each)] == [0] * 2 * RANKS
    kept = copy.deepcopy(first)
    feed(first.each[0], 5, 1)
    assert (first.offset, kept.offset) == (3, 2)


def test_it_answers_as_the_first() -> None:
    """Masks and positions are read off the first rank's cache."""
    caches = [ArraysCache(2), ArraysCache(2)]
    caches[0][1] = "first"
    caches[1][1] = "second"
    together = RankCaches(caches)
    assert together[1] == "first"
    assert together.left_padding is None
    with pytest.raises(AttributeError):
        together.no_such_thing  # noqa: B018
