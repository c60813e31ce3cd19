"""A checkpoint worked out from config.json alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcel.checkpoint.checkpoint import open_checkpoint
from mlxcel.checkpoint.config import ModelConfig
from mlxcel.checkpoint.dtype import choose_dtype, is_quantized
from mlxcel.errors import CheckpointError, UnsupportedError
from mlxcel.family.contract import Family
from mlxcel.family.shapes import TensorShape, embedding, experts, linear, norm
from mlxcel.partition.from_config import checkpoint_from_config, has_weights
from mlxcel.partition.profile import profile_checkpoint

HIDDEN = 128


class Simple(Family):
    """Layers of two matrices, experts and a norm."""

    api_version = "1.0"
    wire_names = ("simple",)

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        inner = config.require("intermediate_size")
        yield from embedding("model.embed_tokens", 256, HIDDEN)
        for layer in range(config.num_layers):
            name = f"model.layers.{layer}"
            yield from linear(f"{name}.self_attn.q_proj", HIDDEN, HIDDEN, bias=True)
            yield from linear(f"{name}.mlp.gate", 4, HIDDEN)
            yield from linear(f"{name}.mlp.gate_proj", inner, HIDDEN)
            yield from experts(f"{name}.mlp.switch_mlp.up_proj", 4, inner, HIDDEN)
            yield from linear(f"{name}.mlp.down_proj", HIDDEN, inner)
            yield from norm(f"{name}.input_layernorm", HIDDEN)
        yield from norm("model.norm", HIDDEN)
        if not self.tied(config):
            yield from linear("lm_head", 256, HIDDEN)


def config_at(path: Path, **settings: Any) -> Path:
    """A folder with nothing but a config.json."""
    defaults = {"model_type": "simple", "num_hidden_layers": 2, "intermediate_size": 192}
    (path / "config.json").write_text(json.dumps(defaults | settings))
    return path


def quantized_by_mlx(shape: tuple[int, ...], **how: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and types that MLX itself makes of a bfloat16 matrix."""
    parts = mx.quantize(mx.zeros(shape, mx.bfloat16), **how)
    names = {mx.uint32: "U32", mx.bfloat16: "BF16", mx.uint8: "U8"}
    return [(part.shape, names[part.dtype]) for part in parts]


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, "BF16"),
        ({"torch_dtype": "float16"}, "F16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "F32"),
        ({"dtype": "torch.float16"}, "F16"),
        ({"dtype": "auto"}, "BF16"),
        ({"text_config": {"dtype": "float16", "num_hidden_layers": 2}}, "F16"),
    ],
)
def test_dtype(settings: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    """Parameters have the type that the settings name, at the top or of the text; else bfloat16."""
    checkpoint = checkpoint_from_config(config_at(tmp_path, **settings), Simple())
    assert {header.dtype for header in checkpoint.loaded.values()} == {dtype}
    head = checkpoint.loaded["lm_head.weight"]
    assert head.shape == (256, HIDDEN)
    assert head.nbytes == 256 * HIDDEN * (4 if dtype == "F32" else 2)


@pytest.mark.parametrize(
    "how",
    [
        *(
            {"group_size": g, "bits": b, "mode": "affine"}
            for g in (32, 64)
            for b in (2, 3, 4, 6, 8)
        ),
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        {"group_size": 32, "bits": 8, "mode": "mxfp8"},
        {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_packed_as_mlx_packs(how: dict[str, Any], tmp_path: Path) -> None:
    """Weight, scales and biases have the shapes and types that MLX makes."""
    checkpoint = checkpoint_from_config(config_at(tmp_path, quantization=how), Simple())
    assert is_quantized(checkpoint)
    for module, shape in {
        "model.embed_tokens": (256, HIDDEN),
        "model.layers.1.mlp.switch_mlp.up_proj": (4, 192, HIDDEN),
        "lm_head": (256, HIDDEN),
    }.items():
        leaves = ("weight", "scales", "biases") if how["mode"] == "affine" else ("weight", "scales")
        found = [checkpoint.loaded[f"{module}.{leaf}"] for leaf in leaves]
        expected = quantized_by_mlx(shape, **how)
        assert [(header.shape, header.dtype) for header in found] == expected
        sizes = {"U32": 4, "BF16": 2, "U8": 1}
        assert [header.nbytes for header in found] == [
            sizes[dtype] * mx.zeros(shape).size for shape, dtype in expected
        ]
        assert (f"{module}.biases" in checkpoint.loaded) == (how["mode"] == "affine")


def packed(checkpoint: Any) -> set[str]:
    """The modules of layer 1 and of the ends that are packed."""
    modules = {name.removesuffix(".scales") for name in checkpoint.loaded if "scales" in name}
    return {module.removeprefix("model.") for module in modules if "layers.0" not in module}


def test_what_no_group_divides_stays_as_it_is(tmp_path: Path) -> None:
    """Rows that are no multiple of the group size, norms and additive biases are not packed."""
    path = config_at(tmp_path, quantization={"group_size": 128, "bits": 4})
    found = packed(checkpoint_from_config(path, Simple()))
    assert "layers.1.mlp.gate_proj" in found
    assert "layers.1.mlp.down_proj" not in found


def test_overrides(tmp_path: Path) -> None:
    """Each module is packed as its own setting says, under any naming, or not at all."""
    settings = {
        "group_size": 64,
        "bits": 4,
        "lm_head": False,
        "language_model.model.layers.1.self_attn.q_proj": {"group_size": 32, "bits": 8},
        "model.layers.1.mlp.gate": {"group_size": 64, "bits": 8},
    }
    checkpoint = checkpoint_from_config(config_at(tmp_path, quantization=settings), Simple())
    headers = checkpoint.loaded
    assert "lm_head.scales" not in headers
    assert headers["model.layers.0.self_attn.q_proj.weight"].shape == (HIDDEN, HIDDEN // 8)
    assert headers["model.layers.1.self_attn.q_proj.weight"].shape == (HIDDEN, HIDDEN // 4)
    assert headers["model.layers.1.self_attn.q_proj.scales"].shape == (HIDDEN, HIDDEN // 32)
    assert headers["model.layers.1.mlp.gate.weight"].shape == (4, HIDDEN // 4)


@pytest.mark.parametrize(
    "left_out",
    [
        {"modules_to_not_convert": ["model.layers.*.self_attn", "mlp.gate", "lm_head"]},
        {"ignore": ["re:.*self_attn.*", r"re:^model\.layers\..*\.mlp\.gate$"]},
    ],
)
def test_what_other_tools_leave_out(left_out: dict[str, Any], tmp_path: Path) -> None:
    """Their lists of modules are kept to; the table and the head they never pack."""
    how = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", **left_out}
    path = config_at(tmp_path, quantization_config=how)
    assert packed(checkpoint_from_config(path, Simple())) == {
        "layers.1.mlp.gate_proj",
        "layers.1.mlp.switch_mlp.up_proj",
        "layers.1.mlp.down_proj",
    }


def test_formats_that_are_unpacked_at_load(tmp_path: Path) -> None:
    """Float8 weights are plain ones in memory."""
    path = config_at(tmp_path, quantization_config={"quant_method": "fp8"})
    checkpoint = checkpoint_from_config(path, Simple())
    assert {header.dtype for header in checkpoint.loaded.values()} == {"BF16"}


@pytest.mark.parametrize("tied", [False, True])
def test_profile_is_that_of_the_weights(tied: bool, tmp_path: Path) -> None:
    """Profile and choice of type are those of a checkpoint on disk with the same parameters."""
    how = {"group_size": 64, "bits": 4}
    path = config_at(tmp_path, quantization=how, tie_word_embeddings=tied)
    family = Simple()
    estimated = checkpoint_from_config(path, family)
    types = {"U32": mx.uint32, "BF16": mx.bfloat16}
    mx.save_safetensors(
        str(path / "model.safetensors"),
        {h.name: mx.zeros(h.shape, types[h.dtype]) for h in estimated.loaded.values()},
    )
    exact = family.open(path)
    assert choose_dtype(estimated, "auto", "cpu") == choose_dtype(exact, "auto", "cpu")
    for dequantize in (False, True):
        dtype = choose_dtype(exact, "auto", "cpu")
        assert profile_checkpoint(
            estimated, family, dtype, dequantize=dequantize
        ) == profile_checkpoint(exact, family, dtype, dequantize=dequantize)


def test_there_is_nothing_to_load(tmp_path: Path) -> None:
    """The checkpoint has no files, and cannot be opened as one with weights."""
    path = config_at(tmp_path)
    assert checkpoint_from_config(path, Simple()).files == ()
    with pytest.raises(CheckpointError, match="holds no model weights"):
        open_checkpoint(path)


def test_has_weights(tmp_path: Path) -> None:
    """A folder with a weight file has weights; a config.json stands for itself alone."""
    path = config_at(tmp_path)
    assert not has_weights(path)
    (path / "model.safetensors.index.json").write_text("{}")
    assert not has_weights(path)
    (path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert has_weights(path)
    assert not has_weights(path / "config.json")


def test_a_family_that_cannot_say(tmp_path: Path) -> None:
    """A family without shapes is refused with the way out."""

    class Silent(Family):
        api_version = "1.0"
        wire_names = ("silent",)

    with pytest.raises(UnsupportedError, match="folder that holds the weights"):
        checkpoint_from_config(config_at(tmp_path), Silent())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"intermediate_size": None}, "has no 'intermediate_size'"),
        ({"quantization": {"mode": "zip4"}}, "unknown mode 'zip4'"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """The error names the file and the field."""
    with pytest.raises(CheckpointError, match=problem) as caught:
        checkpoint_from_config(config_at(tmp_path, **settings), Simple())
    assert caught.value.path == tmp_path / "config.json"
