"""Weights that other tools packed: read where mlx-lm reads them, refused by name elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.headers import DTYPE_BITS
from mlxcel.cli.main import run
from mlxcel.errors import CheckpointError
from mlxcel.family import Family
from mlxcel.partition.consistency import check_consistency
from mlxcel.stage.load import load_stage
from mlxcel.testing.checkpoint_writer import TensorSpec, write_checkpoint
from mlxcel.testing.split import Scene, check_split
from mlxcel.testing.survey.model import build

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]
PlannedBytes = Callable[[Checkpoint, Family, str | None], None]
Tensors = dict[str, mx.array]

KINDS = {mx.float32: "F32", mx.int32: "I32", mx.uint8: "U8", mx.uint32: "U32", mx.bfloat16: "BF16"}
Q_PROJ = "model.layers.3.self_attn.q_proj"


def tensors_of(path: Path) -> Tensors:
    tensors = mx.load(str(path / "model.safetensors"))
    assert isinstance(tensors, dict)
    return tensors


def write(source: Path, out: Path, tensors: Tensors, settings: Mapping[str, Any]) -> Path:
    """``source`` with these tensors, of which uint8 is written as float8."""
    kinds = {**KINDS, mx.uint8: "F8_E4M3"}
    config = json.loads((source / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        out.mkdir(exist_ok=True)
        (out / name).write_bytes((source / name).read_bytes())
    return write_checkpoint(
        out,
        {name: TensorSpec(kinds[value.dtype], value.shape) for name, value in tensors.items()},
        lambda name: np.array(mx.contiguous(tensors[name]).reshape(-1).view(mx.uint8)).tobytes(),
        config=config | {"quantization_config": dict(settings)},
    )


def float8(source: Path, out: Path) -> Path:
    """Matrices of layers as float8, with a scale for each block of 128 x 128."""
    tensors = tensors_of(source)
    for name, value in sorted(tensors.items()):
        if ".layers." in name and name.endswith("_proj.weight") and value.ndim == 2:
            tensors[name] = mx.to_fp8(value * 100)
            tensors[f"{name}_scale_inv"] = mx.full([-(-size // 128) for size in value.shape], 0.01)
    return write(source, out, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})


def awq(source: Path, out: Path, *, group: int = 64) -> Path:
    """Every linear layer as AutoAWQ stores it; the numbers in them mean nothing."""
    tensors: Tensors = {}
    for name, value in sorted(tensors_of(source).items()):
        module = name.removesuffix(".weight")
        if ".layers." in name and name.endswith("_proj.weight"):
            rows, columns = value.shape
            words = mx.arange(columns * rows // 8, dtype=mx.uint32) * 2654435761
            tensors[f"{module}.qweight"] = words.reshape(columns, rows // 8).view(mx.int32)
            zeros = mx.full((columns // group, rows // 8), 0x77777777, mx.uint32)
            tensors[f"{module}.qzeros"] = zeros.view(mx.int32)
            tensors[f"{module}.scales"] = mx.full((columns // group, rows), 0.005)
        else:
            tensors[name] = value
    settings = {"quant_method": "awq", "bits": 4, "group_size": group}
    return write(source, out, tensors, settings)


@pytest.mark.parametrize(
    "architecture", ["glm_moe_dsa", "deepseek_v32", "mimo_v2_flash", "minimax", "mistral4"]
)
def test_float8_takes_the_planned_bytes(
    tiny: Tiny,
    family_of: FamilyOf,
    assert_planned_bytes: PlannedBytes,
    tmp_path: Path,
    architecture: str,
) -> None:
    """Where mlx-lm unpacks float8, it is planned as the bfloat16 that it becomes, and split."""
    if architecture == "glm_moe_dsa":
        source = tiny(architecture)
    else:
        source = build(architecture, tmp_path / "plain")
    path = float8(source, tmp_path / "float8")
    family = family_of(path)
    checkpoint = family.open(path)
    check_consistency(checkpoint, family)
    assert any(name.endswith("_scale_inv") for name in checkpoint.tensors)
    for cast in (None, "float32"):
        assert_planned_bytes(checkpoint, family, cast)
    assert check_split(path, family, scenes=[Scene((17,), steps=2)], dtype="float32") == []


def test_awq(tiny: Tiny, family_of: FamilyOf, tmp_path: Path) -> None:
    """What mlx-lm's loader repacks is split as mlx-lm runs it."""
    path = awq(tiny("llama_tied"), tmp_path / "awq")
    family = family_of(path)
    check_consistency(family.open(path), family)
    assert check_split(path, family, scenes=[Scene((17,), steps=2)], dtype="float32") == []


def test_awq_without_its_scales(tiny: Tiny, family_of: FamilyOf, tmp_path: Path) -> None:
    """What mlx-lm cannot repack is an error of the checkpoint, with the tensor that it missed."""
    path = awq(tiny("llama_tied"), tmp_path / "awq")
    whole = tensors_of(path)
    del whole[f"{Q_PROJ}.scales"]
    mx.save_safetensors(str(path / "model.safetensors"), whole, {"format": "pt"})
    (path / "model.safetensors.index.json").unlink()
    family = family_of(path)
    with pytest.raises(CheckpointError, match=f"awq tensors cannot be repacked.*{Q_PROJ}.scales"):
        load_stage(family.open(path), family, 0, 1, None)


def test_one_bit(tiny: Tiny, family_of: FamilyOf) -> None:
    """A matrix of one bit per weight, for which MLX has a kernel, is read and split."""
    path = tiny("llama", quantize="1:64")
    scene = Scene((17,), steps=1)
    assert check_split(path, family_of(path), scenes=[scene], dtype="float32") == []


def packed_by(method: str) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """The settings of a tool, and what it adds to a matrix or puts into its place."""
    byte, one = mx.zeros((64, 32), mx.uint8), mx.ones((1,))
    match method:
        case "bitsandbytes":
            return {"load_in_4bit": True}, {"weight": byte, "weight.absmax": one}
        case "fp8":
            return {"weight_block_size": [128, 128]}, {"weight": byte, "weight_scale_inv": one}
        case "compressed-tensors":
            return {"format": "pack-quantized"}, {"weight_packed": byte, "weight_scale": one}
        case "modelopt":
            extra = {"weight_scale": one, "weight_scale_2": one}
            return {"quant_algo": "NVFP4"}, {"weight": byte, **extra}
        case "gptq":
            return {"bits": 4}, {"qweight": mx.zeros((8, 8), mx.int32), "g_idx": one}
    return {}, {"weight": byte}


@pytest.mark.parametrize(
    "method",
    [
        *("bitsandbytes", "fp8", "compressed-tensors", "modelopt"),
        *("hqq", "quanto", "torchao", "bitnet"),
    ],
)
def test_what_is_not_read_is_refused(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    """Plan and generate say the same before anything loads: the method, the file, the way out."""
    settings, parts = packed_by(method)
    tensors = tensors_of(tiny("llama"))
    del tensors[f"{Q_PROJ}.weight"]
    tensors |= {f"{Q_PROJ}.{leaf}": value for leaf, value in parts.items()}
    path = write(tiny("llama"), tmp_path / "packed", tensors, {"quant_method": method, **settings})
    said = []
    for command in (["plan", "-m", str(path)], ["generate", "-m", str(path), "-p", "Hey"]):
        assert run(command) == 1
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert said[0] == said[1]
    assert f"{path / 'config.json'}: the weights are packed by '{method}' ({Q_PROJ}." in said[0]
    assert "in model.safetensors), which is not read for a model of type 'llama'." in said[0]
    assert "mlx_lm.convert" in said[0]


def test_group_indices_are_refused(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPTQ is read, but not with indices of groups: the error names them and not the tool alone."""
    settings, parts = packed_by("gptq")
    tensors = tensors_of(tiny("llama"))
    del tensors[f"{Q_PROJ}.weight"]
    tensors |= {f"{Q_PROJ}.{leaf}": value for leaf, value in parts.items()}
    path = write(tiny("llama"), tmp_path / "packed", tensors, {"quant_method": "gptq", **settings})
    assert run(["plan", "-m", str(path)]) == 1
    said = capsys.readouterr().err
    indices = f"{Q_PROJ}.g_idx in model.safetensors"
    assert f"{path}: its gptq tensors have group indices ({indices}), which are not read." in said
    assert "mlx_lm.convert" in said


def plan_of_config(source: Path, folder: Path, method: str, settings: Mapping[str, Any]) -> int:
    """The exit code of a plan from ``source``'s config.json alone, with these settings."""
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return run(["plan", "-m", str(folder / "config.json")])


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("bitsandbytes", {}),
        ("compressed-tensors", {"format": "pack-quantized"}),
        ("modelopt", {"quant_algo": "NVFP4"}),
        ("fp8", {"scale_fmt": "ue8m0", "weight_block_size": [32, 32]}),
    ],
)
def test_a_config_alone_is_refused_too(
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    settings: dict[str, Any],
) -> None:
    """A plan from config.json goes by what that says, and refuses what no run would read."""
    assert plan_of_config(tiny("llama"), tmp_path, method, settings) == 1
    assert f"packed by '{method}', which is not read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "method", "settings"),
    [
        ("llama", "awq", {}),
        ("llama", "mxfp4", {}),
        ("deepseek_v3", "compressed-tensors", {"format": "pack-quantized"}),
        ("kimi_k3", "compressed-tensors", {"format": "mxfp4-pack-quantized"}),
    ],
)
def test_a_config_alone_of_what_is_read(
    tiny: Tiny, tmp_path: Path, name: str, method: str, settings: dict[str, Any]
) -> None:
    """What the loader or the family's class unpacks is planned without weights too."""
    assert plan_of_config(tiny(name), tmp_path, method, settings) == 0


BITNET = {
    "model.embed_tokens.weight": TensorSpec("BF16", (32, 64)),
    "model.layers.0.mlp.up_proj.weight": TensorSpec("U8", (16, 64)),
    "model.layers.0.mlp.up_proj.weight_scale": TensorSpec("BF16", (1,)),
    "model.norm.weight": TensorSpec("BF16", (64,)),
}
PACKED_TABLE = {
    "model.embed_tokens.weight": TensorSpec("U32", (32, 8)),
    "model.embed_tokens.scales": TensorSpec("BF16", (32, 1)),
    "model.embed_tokens.biases": TensorSpec("BF16", (32, 1)),
}


def headers(path: Path, tensors: Mapping[str, TensorSpec], **config: Any) -> Path:
    """A checkpoint of one layer with these tensors, all of them zeros."""
    return write_checkpoint(
        path,
        tensors,
        lambda name: bytes(math.prod(tensors[name].shape) * DTYPE_BITS[tensors[name].dtype] // 8),
        config={"num_hidden_layers": 1, "tie_word_embeddings": True, **config},
    )


@pytest.mark.parametrize(
    ("tensors", "settings"),
    [
        (BITNET, {"quantization_config": {"quant_method": "bitnet"}}),
        (BITNET | PACKED_TABLE, {"quantization": {"bits": 4, "group_size": 64}}),
    ],
    ids=["once", "twice"],
)
def test_bitnet(
    family_of: FamilyOf,
    tmp_path: Path,
    tensors: dict[str, TensorSpec],
    settings: dict[str, Any],
) -> None:
    """BitNet's layers are packed by themselves, also where mlx-lm has packed the table besides."""
    path = headers(tmp_path, tensors, model_type="bitnet", **settings)
    family = family_of(path)
    checkpoint = family.open(path)
    check_consistency(checkpoint, family)
    stored = sum(header.nbytes for header in checkpoint.tensors.values())
    assert sum(header.nbytes for header in checkpoint.loaded.values()) == stored


def test_scales_that_only_bitnet_has(family_of: FamilyOf, tmp_path: Path) -> None:
    """The same tensors in a model of another type are what a tool has left over."""
    settings = {"bits": 4, "group_size": 64}
    path = headers(tmp_path, BITNET | PACKED_TABLE, model_type="llama", quantization=settings)
    family = family_of(path)
    with pytest.raises(CheckpointError, match=r"packed in a form that it does not name.*_scale "):
        check_consistency(family.open(path), family)


def test_muse_spark(family_of: FamilyOf, tmp_path: Path) -> None:
    """Experts in NVFP4 are known by MLX's names; the scales of activations are not read."""
    experts = "model.language_model.layers.0.mlp.experts"
    tensors = {
        "model.language_model.embed_tokens.weight": TensorSpec("BF16", (32, 64)),
        f"{experts}.down_proj": TensorSpec("U8", (2, 64, 32)),
        f"{experts}.down_proj_weight_scale": TensorSpec("F8_E4M3", (2, 64, 4)),
        f"{experts}.down_proj_weight_scale_2": TensorSpec("F32", (2,)),
        f"{experts}.down_proj_input_scale": TensorSpec("F32", (2,)),
    }
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    path = headers(tmp_path, tensors, model_type="muse_spark", quantization_config=settings)
    family = family_of(path)
    checkpoint = family.open(path)
    check_consistency(checkpoint, family)
    assert "modelopt" in family.unpacks(checkpoint.config)
    assert {name: header.dtype for name, header in checkpoint.loaded.items()} == {
        "model.language_model.embed_tokens.weight": "BF16",
        f"{experts}.down_proj.weight": "U8",
        f"{experts}.down_proj.scales": "F8_E4M3",
        f"{experts}.down_proj.global_scale": "F32",
    }


def test_plain_weights_that_were_packed_once(
    tiny: Tiny, family_of: FamilyOf, tmp_path: Path
) -> None:
    """A conversion that unpacked everything may still name the tool."""
    source = tiny("llama")
    path = write(source, tmp_path / "plain", tensors_of(source), {"quant_method": "fp8"})
    family = family_of(path)
    check_consistency(family.open(path), family)
    assert check_split(path, family, scenes=[Scene((17,), steps=1)]) == []
