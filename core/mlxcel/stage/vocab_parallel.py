"""A token embedding and an output projection of which each rank has a share of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxcel.stage.together import Joint


class VocabParallelEmbedding(nn.Module):
    """In the place of the embedding, also where it is the output projection (tied).

    Args:
        tables: One for each own rank.
        starts: The first token of each.
        rows: Tokens in all.
        joint: Puts the ranks' results together.
    """

    def __init__(
        self, tables: Sequence[nn.Module], starts: Sequence[int], rows: int, joint: Joint
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tables = list(tables)
        self._starts = tuple(starts)
        self._rows = rows
        self._joint = joint

    def __call__(self, tokens: mx.array) -> mx.array:
        """int [...] to [..., hidden]: one rank has a token's row, the others add zeros."""
        parts = []
        for table, start in zip(self.tables, self._starts, strict=True):
            own = tokens - start
            count = table["weight"].shape[0]
            here = (own >= 0) & (own < count)
            rows = table(mx.where(here, own, 0))
            parts.append(mx.where(here[..., None], rows, mx.zeros_like(rows)))
        return self._joint.add(parts)

    def as_linear(self, h: mx.array) -> mx.array:
        """[..., hidden] to [..., vocabulary]."""
        return self._joint.side_by_side([table.as_linear(h) for table in self.tables], self._rows)


class VocabParallelHead(nn.Module):
    """In the place of the output projection.

    Args:
        heads: One for each own rank.
        rows, joint: See :class:`VocabParallelEmbedding`.
    """

    def __init__(self, heads: Sequence[nn.Module], rows: int, joint: Joint) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heads = list(heads)
        self._rows = rows
        self._joint = joint

    def __call__(self, h: mx.array) -> mx.array:
        """[..., hidden] to [..., vocabulary]."""
        return self._joint.side_by_side([head(h) for head in self.heads], self._rows)
