"""``--dtype``: which floating type a checkpoint's weights, and so its activations, get."""

from __future__ import annotations

import math
import re
from typing import Literal

import attrs

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.headers import DTYPE_BITS, TensorHeader
from mlxcel.errors import UnsupportedError

DTYPES = ("auto", "checkpoint", "float32", "bfloat16", "float16")
"""What ``--dtype`` takes."""

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
_HALF = frozenset({"F16", "BF16"})
_EXPERTS = "on a CPU, MLX's gather_mm multiplies unquantized experts in float32 only"
_SLOW = "on a CPU, quantized weights are 7-25x slower with half-precision activations"
_NORM_WEIGHT = re.compile(r"norm[^.]*\.weight$")
_EXPERT_WEIGHT = re.compile(r"\.(?:experts|switch_mlp|switch_glu)\.(?:.*\.)?(?:weight|\w+_proj)$")


@attrs.frozen
class DtypeChoice:
    """What ``--dtype`` came to.

    Attributes:
        cast: ``float32``, ``bfloat16`` or ``float16``: what floating tensors become at load.
            None leaves them as stored.
        notice: One line for the user.
    """

    cast: str | None
    notice: str


def choose_dtype(
    checkpoint: Checkpoint, requested: str, device: Literal["cpu", "gpu"]
) -> DtypeChoice:
    """Decide what the checkpoint's floating tensors become on ``device``.

    ``auto`` keeps the checkpoint's types, with two exceptions on a CPU: quantized weights with
    half-precision norms, where MLX's products are 7-25x slower than with float32 activations,
    and unquantized half-precision experts, which MLX multiplies in float32 only.

    Raises:
        UnsupportedError: ``requested`` is not one of :data:`DTYPES`, or asks for unquantized
            experts in half precision on a CPU.
    """
    if requested not in DTYPES:
        raise UnsupportedError(
            f"--dtype {requested} does not exist.", f"Choose one of {', '.join(DTYPES)}."
        )
    as_stored = requested in ("auto", "checkpoint")
    activations = _activation_dtypes(checkpoint)
    stored = "/".join(sorted(_NAMES[dtype] for dtype in activations)) or "none"
    wanted = stored if as_stored else requested
    problem = None
    if device == "cpu":
        experts = _plain_expert_dtypes(checkpoint)
        half = requested in ("bfloat16", "float16")
        if experts & _HALF if as_stored else experts and half:
            problem = _EXPERTS
        elif is_quantized(checkpoint) and (activations & _HALF if as_stored else half):
            problem = _SLOW
    if problem is not None and requested == "auto":
        return DtypeChoice("float32", f"activations: float32, not {stored} as stored: {problem}")
    if problem == _EXPERTS:
        raise UnsupportedError(
            f"--dtype {requested} cannot run this checkpoint: {problem}.",
            "Use --dtype float32 or auto, or a checkpoint with quantized experts.",
        )
    how = "as stored" if as_stored else f"stored: {stored}"
    slow = "" if problem is None else f"; {problem}"
    return DtypeChoice(None if as_stored else requested, f"activations: {wanted} ({how}){slow}")


def stored_bytes(header: TensorHeader, choice: DtypeChoice, casts: bool) -> int:
    """Bytes that a tensor takes once loaded under ``choice``.

    Args:
        header: The tensor as its file describes it.
        choice: What ``--dtype`` came to.
        casts: Whether ``--dtype`` applies to this tensor at all. Integers, packed weights and
            8-bit scales never change.
    """
    if choice.cast is None or not casts or header.dtype not in _NAMES:
        return header.nbytes
    return math.prod(header.shape) * _ITEMSIZE[choice.cast]


def activation_bytes(checkpoint: Checkpoint, choice: DtypeChoice) -> int:
    """Bytes of one number of the activations, and so of the KV caches, under ``choice``."""
    if choice.cast is not None:
        return _ITEMSIZE[choice.cast]
    stored = _activation_dtypes(checkpoint)
    return max((DTYPE_BITS[dtype] // 8 for dtype in stored), default=_ITEMSIZE["float32"])


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Whether MLX multiplies with packed weights: MLX's own, or a format it reads as its own."""
    packed = checkpoint.quantization is not None and checkpoint.quantization.mode is not None
    return packed or any(name.endswith(".scales") for name in checkpoint.loaded)


def _activation_dtypes(checkpoint: Checkpoint) -> set[str]:
    """The floating types of the norms, which activations follow; without norms, of all tensors."""
    floating = [tensor for tensor in checkpoint.loaded.values() if tensor.dtype in _NAMES]
    norms = [t for t in floating if len(t.shape) == 1 and _NORM_WEIGHT.search(t.name)]
    return {tensor.dtype for tensor in norms or floating}


def _plain_expert_dtypes(checkpoint: Checkpoint) -> set[str]:
    """The floating types of the expert weights that are not quantized."""
    return {
        tensor.dtype
        for name, tensor in checkpoint.loaded.items()
        if tensor.dtype in _NAMES
        and _EXPERT_WEIGHT.search(name)
        and f"{name.removesuffix('.weight')}.scales" not in checkpoint.loaded
    }
