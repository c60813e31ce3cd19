"""How many bytes a batch's caches take: one pure function for plans, admission and checks.

A batch is padded to its longest row, so what counts is rows times longest. MLX's caches grow
in blocks of 256 positions; the figure is what such a cache can reach at most, never less
than its real ``nbytes``.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from mlxcel.family.caches import (
    CacheGroup,
    CacheKind,
    RotatingCacheKind,
    StateCacheKind,
)

BLOCK = 256
"""Positions by which mlx-lm's caches grow."""


@attrs.frozen
class Workload:
    """The tokens that a plan leaves room for.

    Attributes:
        context: Tokens of a sequence, prompt and generated.
        sequences: How many sequences of that length there are at once.
        chunk: Prompt tokens of one step at most.
    """

    context: int
    sequences: int = 1
    chunk: int = 512

    def kv_bytes(self, caches: Sequence[CacheKind | None], itemsize: int) -> list[int]:
        """The most bytes that each layer's cache takes, where ``caches`` are its kinds."""
        return [
            cache_bytes(kind, self.sequences, self.context, itemsize=itemsize, chunk=self.chunk)
            for kind in caches
        ]


def cache_bytes(
    kind: CacheKind | None, rows: int, longest: int, *, itemsize: int, chunk: int = 512
) -> int:
    """The most bytes that one layer's cache takes for a batch.

    Args:
        kind: What the layer keeps; None for a layer without a cache.
        rows: Sequences in the batch.
        longest: Tokens of the longest of them, prompt and generated. Where the longest sequence
            has left a batch of rotating caches, its padding stays: there the batch counts on
            from the longest that it ever was.
        itemsize: Bytes of one activation.
        chunk: Prompt tokens of one step at most: a rotating cache holds a whole chunk on top
            of its window.
    """
    if kind is None or rows == 0:
        return 0
    if isinstance(kind, CacheGroup):
        return sum(
            cache_bytes(part, rows, longest, itemsize=itemsize, chunk=chunk) for part in kind.kinds
        )
    if isinstance(kind, StateCacheKind):
        return rows * sum(count * (size or itemsize) for count, size in kind.states)
    if longest == 0:
        return 0
    positions = longest + BLOCK - 1
    if isinstance(kind, RotatingCacheKind):
        positions = min(positions, max(kind.window, kind.window + min(chunk, longest) - 1))
    return rows * kind.heads * (kind.key_dim + kind.value_dim) * itemsize * positions
