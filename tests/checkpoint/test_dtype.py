from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.checkpoint.checkpoint import Checkpoint, open_checkpoint
from mlxcel.checkpoint.dtype import (
    DtypeChoice,
    activation_bytes,
    choose_dtype,
    stored_bytes,
)
from mlxcel.checkpoint.headers import TensorHeader
from mlxcel.errors import UnsupportedError

PROJECTION = "model.layers.0.self_attn.q_proj"
NORM = "model.layers.0.input_layernorm.weight"
EXPERTS = [
    "model.layers.0.block_sparse_moe.experts.3.w1.weight",
    "model.layers.0.mlp.switch_mlp.up_proj.weight",
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.experts.switch_glu.down_proj.weight",
]
NO_EXPERT_WEIGHTS = [
    "model.layers.0.mlp.experts.gate_up_proj_bias",
    "model.layers.0.mlp.experts.3.up_proj.weight_scale",
    "model.layers.0.mlp.shared_experts.up_proj.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.experts.up_proj.scales",
]


@pytest.fixture
def dense(write_checkpoint: Callable[..., Path]) -> Callable[..., Checkpoint]:
    """A dense checkpoint with norms of one type and weights of another, or quantized ones."""

    def make(norm: str, weight: str, **more: str) -> Checkpoint:
        tensors: dict[str, Any] = {NORM: (norm, (8,))}
        if weight == "4-bit":
            tensors[f"{PROJECTION}.weight"] = ("U32", (8, 4))
            tensors[f"{PROJECTION}.scales"] = (norm, (8, 1))
        else:
            tensors[f"{PROJECTION}.weight"] = (weight, (8, 32))
        tensors |= {name: (dtype, (2, 8, 32)) for name, dtype in more.items()}
        return open_checkpoint(write_checkpoint(tensors))

    return make


@pytest.mark.parametrize("requested", ["auto", "checkpoint"])
@pytest.mark.parametrize("norm", ["F32", "F16", "BF16"])
def test_dense_weights_stay(dense: Any, requested: str, norm: str) -> None:
    """Unquantized dense weights run as they are stored."""
    choice = choose_dtype(dense(norm, norm), requested, "cpu")
    assert choice.cast is None
    assert "as stored" in choice.notice


@pytest.mark.parametrize("norm", ["F16", "BF16"])
def test_quantized_with_half_norms_on_cpu(dense: Any, norm: str) -> None:
    """On a CPU, auto gives quantized weights float32 activations; a GPU keeps the stored type."""
    checkpoint = dense(norm, "4-bit")
    choice = choose_dtype(checkpoint, "auto", "cpu")
    assert choice.cast == "float32"
    assert "7-25x" in choice.notice
    assert choose_dtype(checkpoint, "auto", "gpu").cast is None
    kept = choose_dtype(checkpoint, "checkpoint", "cpu")
    assert kept.cast is None
    assert "7-25x" in kept.notice


def test_quantized_with_float32_norms(dense: Any) -> None:
    """Quantized weights whose norms are float32 already need no cast."""
    assert choose_dtype(dense("F32", "4-bit"), "auto", "cpu") == DtypeChoice(
        None, "activations: float32 (as stored)"
    )


@pytest.mark.parametrize("name", EXPERTS)
def test_plain_half_experts_on_cpu(dense: Any, name: str) -> None:
    """On a CPU, unquantized half-precision experts get float32, and nothing else may be asked."""
    checkpoint = dense("BF16", "BF16", **{name: "BF16"})
    choice = choose_dtype(checkpoint, "auto", "cpu")
    assert choice.cast == "float32"
    assert "gather_mm" in choice.notice
    for requested in ("checkpoint", "bfloat16", "float16"):
        with pytest.raises(UnsupportedError, match="gather_mm"):
            choose_dtype(checkpoint, requested, "cpu")
    assert choose_dtype(checkpoint, "float32", "cpu").cast == "float32"
    assert choose_dtype(checkpoint, "bfloat16", "gpu").cast == "bfloat16"
    assert choose_dtype(checkpoint, "auto", "gpu").cast is None


def test_plain_float32_experts(dense: Any) -> None:
    """Float32 experts run as stored; casting them down is refused on a CPU."""
    checkpoint = dense("F32", "F32", **{EXPERTS[0]: "F32"})
    assert choose_dtype(checkpoint, "auto", "cpu").cast is None
    with pytest.raises(UnsupportedError, match="gather_mm"):
        choose_dtype(checkpoint, "bfloat16", "cpu")


@pytest.mark.parametrize("name", NO_EXPERT_WEIGHTS)
def test_what_is_no_expert_weight(dense: Any, name: str) -> None:
    """Routers, shared experts, biases and scales do not make a checkpoint an unquantized MoE."""
    checkpoint = dense("BF16", "BF16", **{name: "BF16"})
    assert choose_dtype(checkpoint, "bfloat16", "cpu").cast == "bfloat16"


def test_quantized_experts(dense: Any) -> None:
    """Experts with scales beside them are quantized, whatever type the scales have."""
    name = EXPERTS[1].removesuffix(".weight")
    checkpoint = dense("F32", "F32", **{f"{name}.weight": "U32", f"{name}.scales": "U8"})
    assert choose_dtype(checkpoint, "bfloat16", "cpu").cast == "bfloat16"


def test_explicit_half_on_quantized_is_allowed_and_said_to_be_slow(dense: Any) -> None:
    """Slow is allowed when asked for, with a word about it."""
    choice = choose_dtype(dense("F32", "4-bit"), "bfloat16", "cpu")
    assert choice.cast == "bfloat16"
    assert "7-25x" in choice.notice


def test_packed_formats_of_other_tools(write_checkpoint: Callable[..., Path]) -> None:
    """A format that becomes MLX's own counts as quantized without a .scales tensor."""
    tensors = {NORM: ("BF16", (8,)), "model.layers.0.mlp.up_proj_blocks": ("U8", (8, 16))}
    folder = write_checkpoint(tensors, quantization_config={"quant_method": "mxfp4"})
    assert choose_dtype(open_checkpoint(folder), "auto", "cpu").cast == "float32"


def test_unknown_dtype(dense: Any) -> None:
    """A type that does not exist is refused with the list of those that do."""
    with pytest.raises(UnsupportedError, match="bfloat16"):
        choose_dtype(dense("F32", "F32"), "int4", "cpu")


@pytest.mark.parametrize(
    ("dtype", "cast", "casts", "expected"),
    [
        ("BF16", None, True, 12),
        ("BF16", "float32", True, 24),
        ("BF16", "float32", False, 12),
        ("F32", "bfloat16", True, 12),
        ("F64", "float16", True, 12),
        ("U32", "bfloat16", True, 24),
        ("U8", "float32", True, 6),
        ("F8_E4M3", "float32", True, 6),
    ],
)
def test_stored_bytes(dtype: str, cast: str | None, casts: bool, expected: int) -> None:
    """Only floating tensors to which --dtype applies change their size."""
    itemsize = {"BF16": 2, "F32": 4, "F64": 8, "U32": 4, "U8": 1, "F8_E4M3": 1}[dtype]
    header = TensorHeader("w", dtype, (2, 3), 6 * itemsize, Path("m.safetensors"))
    assert stored_bytes(header, DtypeChoice(cast, ""), casts) == expected


@pytest.mark.parametrize(
    ("norm", "weight", "cast", "expected"),
    [
        ("BF16", "BF16", None, 2),
        ("F32", "BF16", None, 4),
        ("F16", "4-bit", None, 2),
        ("F16", "4-bit", "float32", 4),
        ("F32", "F32", "bfloat16", 2),
    ],
)
def test_activation_bytes(
    dense: Any, norm: str, weight: str, cast: str | None, expected: int
) -> None:
    """Activations follow the norms, or the cast."""
    assert activation_bytes(dense(norm, weight), DtypeChoice(cast, "")) == expected
