"""A rank's share of a tensor, read out of its file."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxcel.checkpoint.headers import DTYPE_BITS, TensorHeader, read_header
from mlxcel.errors import CheckpointError
from mlxcel.stage import slices
from mlxcel.stage.slices import read_share
from mlxcel.tensor.shard import VOCAB, Shard, ShardStrategy, column, row

DTYPES = sorted(DTYPE_BITS.keys() - {"F64", "F8_E5M2", "F4"})
"""Those that MLX loads."""

SHARES = {
    "rows": ((12, 10), column(), 2),
    "heads": ((12, 10), column(6), 3),
    "repeated heads": ((12, 10), column(2, repeats=True), 4),
    "pieces of different sizes": ((22, 3), column(segments=(8, 8, 2, 4)), 2),
    "ragged vocabulary": ((13, 4), VOCAB, 3),
    "columns": ((7, 12), row(), 4),
    "bias": ((12,), column(axis=-1), 2),
    "convolution": ((12, 4, 1), column(axis=-3, segments=(4, 8)), 2),
    "experts": ((5, 4, 6), Shard(ShardStrategy.EXPERT, axis=0), 2),
    "rows of experts": ((3, 8, 6), column(), 2),
    "columns of experts": ((3, 8, 6), row(), 2),
    "one row": ((1, 12), row(), 2),
    "no rows": ((0, 12), row(), 2),
}

Write = Callable[[str, tuple[int, ...]], TensorHeader]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a tensor of random bits between two others."""

    def write(dtype: str, shape: tuple[int, ...]) -> TensorHeader:
        count = math.prod(shape) * DTYPE_BITS[dtype] // 8
        data = np.random.default_rng(count).integers(0, 256, count, np.uint8)
        if dtype == "BOOL":
            data %= 2
        ends = [0, 3, 3 + count, 5 + count]
        names = {"before": ("U8", (3,)), "it": (dtype, shape), "after": ("U8", (2,))}
        header = json.dumps(
            {
                name: {"dtype": kind, "shape": dims, "data_offsets": ends[i : i + 2]}
                for i, (name, (kind, dims)) in enumerate(names.items())
            }
        ).encode()
        file = tmp_path / "model.safetensors"
        file.write_bytes(struct.pack("<Q", len(header)) + header + b"abc" + data.tobytes() + b"de")
        return read_header(file)["it"]

    return write


def bits(value: mx.array) -> list[int]:
    return np.array(mx.contiguous(value).view(mx.uint8)).ravel().tolist()


def check(tensor: TensorHeader, shard: Shard, ranks: int) -> None:
    whole = mx.load(str(tensor.file))["it"]
    for rank in range(ranks):
        parts = shard.parts(tensor.shape[shard.axis], rank, ranks)
        chosen = mx.array([index for part in parts for index in part])
        share = read_share(tensor, whole.dtype, shard.axis, parts)
        expected = mx.take(whole, chosen, axis=shard.axis)
        assert (share.dtype, share.shape) == (expected.dtype, expected.shape)
        assert share.size == 0 or bits(share) == bits(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_types(write: Write, dtype: str) -> None:
    """Rows and columns of every type are those of the whole tensor, bit by bit."""
    for shard in (column(), row()):
        check(write(dtype, (6, 4)), shard, 2)


@pytest.mark.parametrize(("block", "seek"), [(4 << 20, 64 << 10), (40, 64 << 10), (40, 1)])
@pytest.mark.parametrize("shape, shard, ranks", SHARES.values(), ids=SHARES)  # noqa: PT006
def test_all_shares(
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    shard: Shard,
    ranks: int,
    block: int,
    seek: int,
) -> None:
    """However a tensor is cut, in few blocks or many or none, the bits are the same."""
    monkeypatch.setattr(slices, "BLOCK_BYTES", block)
    monkeypatch.setattr(slices, "SEEK_BYTES", seek)
    check(write("BF16", shape), shard, ranks)


@pytest.mark.parametrize("shard", [column(), row()])
def test_a_file_that_shrank(write: Write, shard: Shard) -> None:
    """The error names the file and the tensor."""
    tensor = write("F32", (6, 4))
    with tensor.file.open("r+b") as file:
        file.truncate(tensor.offset + tensor.nbytes - 1)
    with pytest.raises(CheckpointError, match="shorter: the tensor 'it'") as caught:
        read_share(tensor, mx.float32, shard.axis, shard.parts(tensor.shape[shard.axis], 1, 2))
    assert caught.value.path == tensor.file


def test_a_file_that_is_gone(write: Write) -> None:
    """So does that of a file that is there no more."""
    tensor = write("F32", (6, 4))
    tensor.file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*cannot be read"):
        read_share(tensor, mx.float32, 0, (range(3),))
