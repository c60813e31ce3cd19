"""A checkpoint of given shapes with random weights; one tensor is in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlxcel.testing.checkpoint_writer import TensorSpec, write_checkpoint
from mlxcel.testing.tiny.tokenizer import BOS, EOS, PAD, write_tokenizer

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
_KINDS = {"bfloat16": "BF16", "float32": "F32"}


def write_random(
    out: Path,
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    *,
    dtype: str,
    shards: int,
    seed: int,
) -> Path:
    """Write tensors of ``shapes``, ``config`` and the tokenizer into the folder ``out``.

    Matrices keep the scale of what they multiply, vectors are ones.

    Args:
        dtype: A key of :data:`ITEM_BYTES`.

    Returns:
        ``out``.
    """
    random = np.random.default_rng(seed)

    def read(name: str) -> bytes:
        shape = shapes[name]
        if len(shape) == 1:
            values = np.ones(shape, np.float32)
        else:
            values = random.standard_normal(shape, dtype=np.float32)
            values *= np.float32(1 / math.sqrt(shape[-1]))
        if dtype == "bfloat16":  # the upper half of a float32, as the byte order has it
            return values.view("<u4").astype("<u4").view("<u2")[..., 1::2].tobytes()
        return values.tobytes()

    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    write_checkpoint(
        out,
        {name: TensorSpec(_KINDS[dtype], shape) for name, shape in shapes.items()},
        read,
        config={**config, **tokens, "torch_dtype": dtype},
        shards=shards,
    )
    write_tokenizer(out)
    return out


def check_dtype(dtype: str) -> None:
    """Raise ValueError for a dtype that :func:`write_random` does not write."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype is {dtype!r}, not bfloat16 or float32")
