"""When quantized weights are dequantized at load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.checkpoint import weights_mode
from mlxcel.checkpoint.checkpoint import Checkpoint, open_checkpoint
from mlxcel.checkpoint.weights_mode import (
    HEADROOM,
    RESERVE_BYTES,
    WeightsChoice,
    available_memory,
    choose_weights,
)
from mlxcel.errors import UnsupportedError

GB = 10**9
MODULE = "model.layers.0.mlp.up_proj"


@pytest.fixture
def packed(write_checkpoint: Callable[..., Path]) -> Checkpoint:
    tensors = {f"{MODULE}.weight": ("U32", (8, 8)), f"{MODULE}.scales": ("F32", (8, 1))}
    return open_checkpoint(write_checkpoint(tensors, quantization={"group_size": 64, "bits": 4}))


@pytest.fixture
def plain(write_checkpoint: Callable[..., Path]) -> Checkpoint:
    return open_checkpoint(write_checkpoint({f"{MODULE}.weight": ("BF16", (8, 64))}))


def choose(checkpoint: Checkpoint, requested: str = "auto", **changes: Any) -> WeightsChoice:
    """The choice where everything speaks for dequantizing, but for ``changes``."""
    circumstances: dict[str, Any] = {
        "dtype": "auto",
        "device": "cpu",
        "fast_blas": True,
        "plain_bytes": 4 * GB,
        "memory_bytes": 16 * GB,
    }
    return choose_weights(checkpoint, requested, **circumstances | changes)


def test_auto_dequantizes_on_a_cpu_with_a_fast_blas(packed: Checkpoint) -> None:
    """With a fast BLAS and memory to spare, packed weights become float32."""
    choice = choose(packed)
    assert choice.dequantize
    assert choice.notice == "weights: dequantized to float32, 4.0 GB"


@pytest.mark.parametrize(
    "circumstance",
    [
        {"device": "gpu"},
        {"fast_blas": False},
        {"memory_bytes": 4 * GB},
        {"memory_bytes": None},
        {"dtype": "bfloat16"},
        {"dtype": "checkpoint"},
    ],
)
def test_auto_keeps_weights_packed_otherwise(
    packed: Checkpoint, circumstance: dict[str, Any]
) -> None:
    """On a GPU, with a slow BLAS, little or unknown memory or another type, nothing is unpacked."""
    choice = choose(packed, **circumstance)
    assert not choice.dequantize
    assert choice.notice is not None and "quantized, as stored" in choice.notice


def test_memory_must_hold_weights_and_a_reserve(packed: Checkpoint) -> None:
    """auto leaves room beside the weights, to the byte."""
    enough = int(4 * GB * HEADROOM) + RESERVE_BYTES
    assert choose(packed, memory_bytes=enough).dequantize
    short = choose(packed, memory_bytes=enough - 1)
    assert not short.dequantize
    assert short.notice is not None and "need 5.1 GB of memory (5.1 GB free)" in short.notice


def test_quantized_keeps_them_packed(packed: Checkpoint) -> None:
    """--weights quantized is what is stored, however fast the BLAS."""
    assert not choose(packed, "quantized").dequantize


@pytest.mark.parametrize("circumstance", [{"device": "gpu"}, {"fast_blas": False}])
def test_dequantized_is_done_when_asked_for(
    packed: Checkpoint, circumstance: dict[str, Any]
) -> None:
    """--weights dequantized does so where auto would not."""
    assert choose(packed, "dequantized", **circumstance).dequantize


def test_dequantized_with_little_memory(packed: Checkpoint) -> None:
    """Asked for, it is done even if memory looks short, with a word about that."""
    choice = choose(packed, "dequantized", memory_bytes=2 * GB)
    assert choice.dequantize
    assert choice.notice is not None and "only 2.0 GB" in choice.notice


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "checkpoint"])
def test_dequantized_weights_are_float32(packed: Checkpoint, dtype: str) -> None:
    """--weights dequantized excludes a --dtype that is not float32, and says so."""
    with pytest.raises(UnsupportedError, match=f"--dtype {dtype}"):
        choose(packed, "dequantized", dtype=dtype)


def test_plain_checkpoints_have_nothing_to_unpack(plain: Checkpoint) -> None:
    """Without packed weights auto is silent, and the others say that nothing is done."""
    assert choose(plain) == WeightsChoice(False, None)
    for requested in ("quantized", "dequantized"):
        choice = choose(plain, requested)
        assert not choice.dequantize
        assert choice.notice is not None and "not quantized" in choice.notice


def test_unknown_mode(packed: Checkpoint) -> None:
    """A mode that does not exist is refused with the list of those that do."""
    with pytest.raises(UnsupportedError, match="auto, quantized, dequantized"):
        choose(packed, "packed")


MEMINFO = "MemTotal:       2000 kB\nMemFree:         100 kB\nMemAvailable:    700 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"/proc/meminfo": "MemTotal: 2000 kB\n"}, None),
        ({"/proc/meminfo": MEMINFO}, 700 * 1024),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory.max": "max\n",
                "/sys/fs/cgroup/memory.current": "1000\n",
            },
            700 * 1024,
        ),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory.max": "5000\n",
                "/sys/fs/cgroup/memory.current": "1000\n",
            },
            4000,
        ),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "6000\n",
            },
            0,
        ),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "6000\n",
            },
            700 * 1024,
        ),
    ],
)
def test_available_memory(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int | None
) -> None:
    """The least of the kernel's estimate and the rest of the container's limit."""
    monkeypatch.setattr(weights_mode, "_read", lambda file: files.get(str(file), ""))
    assert available_memory() == expected
