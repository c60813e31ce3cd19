"""A rank's share of plain and of packed tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcel.checkpoint.headers import read_header
from mlxcel.stage.cut import Share, cut
from mlxcel.stage.packed import Packed
from mlxcel.tensor.shard import REPLICATED, VOCAB, Shard, ShardStrategy, column, row

EXPERTS = Shard(ShardStrategy.EXPERT, axis=0, stacked=True)
RANKS = 2


def shares(shard: Shard, ranks: int = RANKS) -> Iterator[Share]:
    return (Share(shard, rank, ranks) for rank in range(ranks))


def packed(weight: mx.array, mode: str = "affine", overall: mx.array | None = None) -> Packed:
    """``weight`` in groups of 32, or of 16 for nvfp4."""
    affine = mode == "affine"
    group_size = 32 if affine else 16
    parts = mx.quantize(weight, group_size=group_size, bits=4, mode=mode)
    return Packed(parts[0], parts[1], parts[2] if affine else None, overall, group_size, 4, mode)


def plain(value: Any) -> mx.array:
    return value.unpack() if isinstance(value, Packed) else value


def test_shares_of_plain_tensors() -> None:
    """Side by side the shares are the tensor; one number is everybody's."""
    whole = mx.random.normal((6, 8))
    for shard in (column(), row(), VOCAB):
        parts = [plain(cut("w", whole, share, {})) for share in shares(shard)]
        assert mx.array_equal(mx.concatenate(parts, axis=shard.axis), whole).item()
    one = mx.array([3.0])
    assert [cut("w", one, share, {}) for share in shares(column(axis=-1))] == [one, one]
    assert cut("w", whole, Share(REPLICATED, 1, 2), {}) is whole


def test_experts_by_turns() -> None:
    """Every second expert is with the same rank."""
    whole = mx.arange(5)[:, None] * mx.ones((5, 2))
    parts = [plain(cut("w", whole, share, {})) for share in shares(EXPERTS)]
    assert [part[:, 0].tolist() for part in parts] == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize(
    ("inputs", "stays_packed"), [(128, True), (96, False)], ids=["whole groups", "half a group"]
)
def test_columns_of_a_packed_matrix(inputs: int, stays_packed: bool) -> None:
    """They are taken as they are packed, unless a group would be divided."""
    whole = packed(mx.random.normal((4, inputs)))
    parts = [cut("m.weight", whole, share, {}) for share in shares(row())]
    assert {isinstance(part, Packed) for part in parts} == {stays_packed}
    together = mx.concatenate([plain(part) for part in parts], axis=-1)
    assert mx.array_equal(together, whole.unpack()).item()


@pytest.mark.parametrize("shard", [column(axis=-2), VOCAB], ids=["columns", "vocabulary"])
def test_rows_of_a_packed_matrix(shard: Shard) -> None:
    """Scales and biases go with the rows."""
    whole = packed(mx.random.normal((7 if shard is VOCAB else 8, 64)))
    parts = [plain(cut("m.weight", whole, share, {})) for share in shares(shard)]
    assert mx.array_equal(mx.concatenate(parts), whole.unpack()).item()


@pytest.mark.parametrize("shard", [EXPERTS, column(), row()], ids=["experts", "columns", "rows"])
def test_a_scale_over_all(shard: Shard) -> None:
    """An nvfp4 stack's overall scales go with its experts, and are with all ranks otherwise."""
    overall = mx.array([448.0, 896.0, 1344.0, 1792.0])
    whole = packed(mx.random.normal((4, 4, 64)), "nvfp4", overall)
    parts = [cut("m.weight", whole, share, {}) for share in shares(shard)]
    for part, share in zip(parts, shares(shard), strict=True):
        assert isinstance(part, Packed)
        indices = [i for r in share.parts(whole.shape[shard.axis]) for i in r]
        expected = mx.take(whole.unpack(), mx.array(indices), axis=shard.axis)
        assert mx.array_equal(part.unpack(), expected).item()


def test_one_scale_over_all() -> None:
    """That of a single matrix is with all ranks."""
    whole = packed(mx.random.normal((4, 64)), "nvfp4", mx.array([448.0]))
    parts = [plain(cut("m.weight", whole, share, {})) for share in shares(column())]
    assert mx.array_equal(mx.concatenate(parts), whole.unpack()).item()


def test_what_stands_in_a_file_is_read_there(tmp_path: Path) -> None:
    """Of a packed matrix each part by itself; then nothing is evaluated that is not the rank's."""
    whole = packed(mx.random.normal((8, 64)))
    assert whole.biases is not None
    file = tmp_path / "m.safetensors"
    parts = {"weight": whole.weight, "scales": whole.scales, "biases": whole.biases}
    mx.save_safetensors(str(file), {f"old.{leaf}": part for leaf, part in parts.items()})
    stored = {f"new.{leaf}": read_header(file)[f"old.{leaf}"] for leaf in parts}
    # In their places stand numbers that would be seen.
    lazy = Packed(*(mx.zeros_like(part) for part in parts.values()), None, 32, 4, "affine")
    for shard in (column(), row()):
        found = [plain(cut("new.weight", lazy, share, stored)) for share in shares(shard)]
        assert mx.array_equal(mx.concatenate(found, axis=shard.axis), whole.unpack()).item()
