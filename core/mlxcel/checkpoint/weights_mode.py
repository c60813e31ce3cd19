"""``--weights``: whether quantized weights stay packed or become plain float32 ones at load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import attrs

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.dtype import is_quantized
from mlxcel.errors import UnsupportedError

WEIGHTS = ("auto", "quantized", "dequantized")
"""What ``--weights`` takes."""

HEADROOM = 1.15
RESERVE_BYTES = 512 << 20
"""Beside the weights: scratch of loading and running, and the caches of the sequences."""

_UNLIMITED = 1 << 60  # what a cgroup without a limit says is larger than this


@attrs.frozen
class WeightsChoice:
    """What ``--weights`` came to.

    Attributes:
        dequantize: Whether every quantized module becomes a plain float32 one at load. All
            other floating parameters are then cast to float32 too.
        notice: One line for the user, or None if there is nothing to say.
    """

    dequantize: bool
    notice: str | None


def choose_weights(
    checkpoint: Checkpoint,
    requested: str,
    *,
    dtype: str,
    device: Literal["cpu", "gpu"],
    fast_blas: bool,
    plain_bytes: int,
    memory_bytes: int | None,
) -> WeightsChoice:
    """Decide whether the checkpoint's quantized weights are dequantized at load.

    ``auto`` dequantizes where that is known to be faster and affordable: on a CPU with a fast
    BLAS, with memory for the float32 weights, and unless ``dtype`` asks for something else.

    Args:
        dtype: The value of ``--dtype``.
        fast_blas: Whether the stages multiply float32 with a fast BLAS.
        plain_bytes: What the stages hold in all once dequantized.
        memory_bytes: What this machine has left; None if it does not say.

    Raises:
        UnsupportedError: ``requested`` is not one of :data:`WEIGHTS`, or asks for dequantized
            weights in another type than float32.
    """
    if requested not in WEIGHTS:
        raise UnsupportedError(
            f"--weights {requested} does not exist.", f"Choose one of {', '.join(WEIGHTS)}."
        )
    if not is_quantized(checkpoint):
        nothing = "weights: as stored; they are not quantized"
        return WeightsChoice(False, None if requested == "auto" else nothing)
    float32 = dtype in ("auto", "float32")
    if requested == "dequantized":
        if not float32:
            raise UnsupportedError(
                f"--weights dequantized makes float32 weights, not --dtype {dtype}.",
                "Leave --dtype out, or keep the weights quantized.",
            )
        return WeightsChoice(True, _dequantized(plain_bytes, memory_bytes))
    if requested == "quantized" or device != "cpu" or not fast_blas or not float32:
        return WeightsChoice(False, "weights: quantized, as stored")
    if not _fits(plain_bytes, memory_bytes):
        left = "unknown" if memory_bytes is None else f"{_gigabytes(memory_bytes)} free"
        return WeightsChoice(
            False,
            f"weights: quantized, as stored; dequantized they would be faster, but need "
            f"{_gigabytes(_wanted(plain_bytes))} of memory ({left})",
        )
    return WeightsChoice(True, _dequantized(plain_bytes, memory_bytes))


def available_memory() -> int | None:
    """Bytes this process can still take without swapping; None where that cannot be read.

    The least of what the kernel calls available and what the limits of its cgroup leave.
    """
    amounts = [*_meminfo(Path("/proc/meminfo")), *_cgroup_rest(Path("/sys/fs/cgroup"))]
    return min(amounts, default=None)


def _dequantized(plain_bytes: int, memory_bytes: int | None) -> str:
    notice = f"weights: dequantized to float32, {_gigabytes(plain_bytes)}"
    if memory_bytes is None or _fits(plain_bytes, memory_bytes):
        return notice
    return f"{notice}; only {_gigabytes(memory_bytes)} of memory are free"


def _wanted(plain_bytes: int) -> int:
    return int(plain_bytes * HEADROOM) + RESERVE_BYTES


def _fits(plain_bytes: int, memory_bytes: int | None) -> bool:
    return memory_bytes is not None and _wanted(plain_bytes) <= memory_bytes


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _meminfo(file: Path) -> Iterator[int]:
    """MemAvailable, see proc_meminfo(5)."""
    if found := re.search(r"^MemAvailable:\s+(\d+) kB$", _read(file), re.MULTILINE):
        yield int(found[1]) * 1024


def _cgroup_rest(root: Path) -> Iterator[int]:
    """Limit less usage of the cgroup that is a container's root, in version 2 or 1."""
    for limit, usage in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory" / "memory.limit_in_bytes", root / "memory" / "memory.usage_in_bytes"),
    ):
        most, used = _read(limit).strip(), _read(usage).strip()
        if most.isdigit() and used.isdigit() and int(most) < _UNLIMITED:
            yield max(0, int(most) - int(used))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
