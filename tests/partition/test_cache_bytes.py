"""The figure for a batch's caches against what mlx-lm's caches really take."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlxcel.family.caches import (
    CacheGroup,
    CacheKind,
    KVCacheKind,
    RotatingCacheKind,
    StateCacheKind,
)
from mlxcel.partition.cache_bytes import BLOCK, Workload, cache_bytes

ITEMSIZE = 2

PLAIN = KVCacheKind(heads=2, key_dim=3, value_dim=5)
STATES = StateCacheKind(states=((6, None), (5, 4)))
KINDS: tuple[CacheKind, ...] = (
    PLAIN,
    RotatingCacheKind(heads=1, key_dim=2, value_dim=1, window=8),
    RotatingCacheKind(heads=1, key_dim=2, value_dim=1, window=300),
    RotatingCacheKind(heads=1, key_dim=2, value_dim=1, window=2000),
    STATES,
    CacheGroup((PLAIN, KVCacheKind(heads=1, key_dim=2, value_dim=0))),
)


def make(kind: CacheKind) -> Any:
    """mlx-lm's own cache of this kind for one sequence."""
    match kind:
        case KVCacheKind():
            return KVCache()
        case RotatingCacheKind():
            return RotatingKVCache(kind.window)
        case StateCacheKind():
            return ArraysCache(len(kind.states))
        case CacheGroup():
            return CacheList(*map(make, kind.kinds))


def feed(cache: Any, kind: CacheKind, rows: int, tokens: int) -> None:
    """Let ``tokens`` columns of ``rows`` sequences pass, as a layer does."""
    match kind:
        case KVCacheKind() | RotatingCacheKind():
            shape = (rows, kind.heads, tokens)
            cache.update_and_fetch(
                mx.zeros((*shape, kind.key_dim), mx.float16),
                mx.zeros((*shape, kind.value_dim), mx.float16),
            )
        case StateCacheKind():
            for index, (count, size) in enumerate(kind.states):
                dtype = {None: mx.float16, 4: mx.float32}[size]
                cache[index] = mx.zeros((rows, count), dtype)
        case CacheGroup():
            for part, part_kind in zip(cache.caches, kind.kinds, strict=True):
                feed(part, part_kind, rows, tokens)


class Batch:
    """A cache beside the lengths of its rows; every change is checked."""

    def __init__(self, kind: CacheKind, chunk: int, cache: Any, lengths: list[int]) -> None:
        self.kind, self.chunk, self.cache, self.lengths = kind, chunk, cache, lengths
        self.columns = max(lengths)
        self.check()

    @classmethod
    def merged(cls, kind: CacheKind, chunk: int, prompts: list[int]) -> Batch:
        """Sequences that were filled one by one, then merged."""
        singles = [cls(kind, chunk, make(kind), [0]) for _ in prompts]
        for single, prompt in zip(singles, prompts, strict=True):
            single.fill(prompt)
        cache = singles[0].cache.merge([single.cache for single in singles])
        return cls(kind, chunk, cache, list(prompts))

    @classmethod
    def together(cls, kind: CacheKind, chunk: int, prompts: list[int]) -> Batch:
        """Sequences that were filled as one batch, the shorter ones padded on the right."""
        cache = make(kind).merge([make(kind) for _ in prompts])
        longest = max(prompts)
        if chunk == 1 or longest % chunk == 1:  # a padded step of one column mlx-lm refuses
            return cls.merged(kind, chunk, prompts)
        cache.prepare(lengths=prompts, right_padding=[longest - n for n in prompts])
        batch = cls(kind, chunk, cache, [0] * len(prompts))
        batch.fill(longest)
        cache.finalize()
        return cls(kind, chunk, cache, list(prompts))

    def fill(self, tokens: int) -> None:
        """A prompt in chunks."""
        for start in range(0, tokens, self.chunk):
            self.step(min(self.chunk, tokens - start))

    def step(self, tokens: int) -> None:
        feed(self.cache, self.kind, len(self.lengths), tokens)
        self.lengths = [length + tokens for length in self.lengths]
        self.columns += tokens
        self.check()

    def filter(self, rows: list[int]) -> None:
        self.cache.filter(rows)
        self.lengths = [self.lengths[row] for row in rows]
        if not isinstance(self.kind, RotatingCacheKind):  # that one keeps its padding
            self.columns = max(self.lengths)
        self.check()

    def extend(self, other: Batch) -> None:
        self.cache.extend(other.cache)
        self.lengths += other.lengths
        self.columns = max(self.columns, other.columns)
        self.check()

    def check(self) -> None:
        """Never less than the real bytes, and not many positions more."""
        rows = len(self.lengths)
        figure = cache_bytes(self.kind, rows, self.columns, itemsize=ITEMSIZE, chunk=self.chunk)
        assert self.cache.nbytes <= figure
        if not isinstance(self.kind, StateCacheKind):
            assert figure - self.cache.nbytes <= rows * position(self.kind) * (BLOCK + self.chunk)
        elif self.columns:
            assert self.cache.nbytes == figure


def position(kind: CacheKind) -> int:
    """Bytes of one position of one sequence."""
    if isinstance(kind, CacheGroup):
        return sum(map(position, kind.kinds))
    assert isinstance(kind, KVCacheKind | RotatingCacheKind)
    return kind.heads * (kind.key_dim + kind.value_dim) * ITEMSIZE


PROMPTS = st.lists(st.integers(1, 700) | st.integers(1, 10), min_size=1, max_size=3)
MAKERS = st.sampled_from([Batch.merged, Batch.together])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_never_less_than_the_real_bytes(kind: CacheKind, data: st.DataObject) -> None:
    """Whatever a batch goes through, its caches take what the figure says, or slightly less."""
    chunk = data.draw(st.sampled_from([1, 16, 100, 256, 512]), "chunk")
    batch = data.draw(MAKERS)(kind, chunk, data.draw(PROMPTS, "prompts"))
    for _ in range(data.draw(st.integers(0, 6), "changes")):
        change = data.draw(st.sampled_from(["decode", "filter", "extend"]))
        if change == "decode":
            for _ in range(data.draw(st.integers(1, 40) | st.just(300), "tokens")):
                batch.step(1)
        elif change == "filter":
            rows = range(len(batch.lengths))
            kept = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
            batch.filter(sorted(kept))
        else:
            batch.extend(data.draw(MAKERS)(kind, chunk, data.draw(PROMPTS, "more prompts")))


def test_rows_count_as_the_longest() -> None:
    """A batch is as many times its longest row, not the sum of its rows."""
    one = cache_bytes(PLAIN, 1, 1000, itemsize=2)
    assert cache_bytes(PLAIN, 3, 1000, itemsize=2) == 3 * one
    assert one == 2 * (3 + 5) * 2 * (1000 + BLOCK - 1)


@pytest.mark.parametrize("kind", [*KINDS, None], ids=lambda kind: type(kind).__name__)
def test_nothing_takes_nothing(kind: CacheKind | None) -> None:
    """No rows, and layers without a cache, take nothing."""
    assert cache_bytes(kind, 0, 100, itemsize=2) == 0
    assert cache_bytes(None, 4, 100, itemsize=2) == 0


def test_no_tokens_take_states_only() -> None:
    """Before the first token there are no keys and values yet."""
    assert cache_bytes(PLAIN, 2, 0, itemsize=2) == 0
    assert cache_bytes(STATES, 2, 0, itemsize=2) == 2 * (6 * 2 + 5 * 4)


def test_a_window_ends_the_growth() -> None:
    """A rotating cache holds its window and a chunk at most."""
    kind = RotatingCacheKind(1, 1, 1, window=1000)
    assert cache_bytes(kind, 1, 100_000, itemsize=1, chunk=512) == 2 * (1000 + 511)
    assert cache_bytes(kind, 1, 100_000, itemsize=1, chunk=1) == 2 * 1000


def test_a_workload_counts_layer_by_layer() -> None:
    """Each layer has the figure of its own kind."""
    workload = Workload(context=300, sequences=2, chunk=64)
    assert workload.kv_bytes([PLAIN, None, STATES], itemsize=4) == [
        cache_bytes(PLAIN, 2, 300, itemsize=4, chunk=64),
        0,
        cache_bytes(STATES, 2, 300, itemsize=4, chunk=64),
    ]
