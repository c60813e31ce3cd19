"""The DeepSeek V3 family: latent attention, experts, both forms of a trailer, packed weights."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.dtype import DtypeChoice, choose_dtype
from mlxcel.cli.main import run
from mlxcel.errors import UnsupportedError
from mlxcel.family import Family
from mlxcel.family.choose import choose_family
from mlxcel.family.transformer import flat_parameters
from mlxcel.partition.profile import profile_checkpoint
from mlxcel.plugins import Plugins
from mlxcel.stage.batch import BatchTable
from mlxcel.stage.load import load_stage
from mlxcel.testing import tiny as checkpoints
from mlxcel.testing.checkpoint_writer import TensorSpec, write_checkpoint
from mlxcel.testing.quick import quick
from mlxcel.testing.split import Chain, Scene, Whole, check_split, differences, drawn_cut, every_cut
from mlxcel.testing.tiny.builder import RECIPES

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]
PlannedBytes = Callable[[Checkpoint, Family, str | None], None]

RAGGED = Scene((17, 5, 11))
TRAILERS = ("deepseek_v3_mtp", "deepseek_v3_mtp_counted")
KINDS = {mx.float32: "F32", mx.bfloat16: "BF16", mx.uint8: "F8_E4M3", mx.uint32: "U32"}
KINDS[mx.int32] = "I32"
every_checkpoint = pytest.mark.parametrize(
    ("name", "quantize"),
    quick(
        itertools.product(["deepseek_v3", "deepseek_v3_noq"], [None, "4:32"]),
        [("deepseek_v3", None), ("deepseek_v3_noq", "4:32")],
    ),
)


@every_checkpoint
def test_split_at_every_layer(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None
) -> None:
    """Cut at every boundary, every logit is the whole model's to the last bit."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    assert len(every_cut(path, family)) == 4
    assert check_split(path, family) == []


@every_checkpoint
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_split_into_three(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None, seed: int
) -> None:
    """So is every partition into stages of several layers."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    ranges = drawn_cut(path, family, 3, seed)
    assert check_split(path, family, ranges, scenes=[RAGGED]) == [], ranges


def test_split_in_bfloat16(tiny: Tiny, family_of: FamilyOf) -> None:
    """Half precision, which a CPU has for packed experts only, is no less identical."""
    path = tiny("deepseek_v3", quantize="4:32", dtype="bfloat16")
    assert check_split(path, family_of(path), scenes=[RAGGED]) == []


@pytest.mark.parametrize("model_type", ["kimi_k2", "joyai_llm_flash"])
def test_other_names(tiny: Tiny, tmp_path: Path, plugins: Plugins, model_type: str) -> None:
    """What shares the architecture runs under its own model_type."""
    path = altered(tiny("deepseek_v3"), tmp_path, config={"model_type": model_type})
    family = plugins.load("family", "deepseek_v3")
    assert isinstance(family, Family)
    assert choose_family(family.open(path).config, plugins) == ("deepseek_v3", family)
    assert check_split(path, family, scenes=[RAGGED]) == []


# The trailer


@pytest.mark.parametrize("name", TRAILERS)
def test_the_trailer_is_never_loaded(tiny: Tiny, family_of: FamilyOf, name: str) -> None:
    """Behind the last layer or counted as the last: four layers run, and nothing else is read."""
    path, plain = tiny(name), tiny("deepseek_v3")
    family = family_of(path)
    checkpoint = family.open(path)
    assert checkpoint.config.num_layers == 4
    assert checkpoint.loaded.keys() == family.open(plain).loaded.keys()
    chain = Chain(path, family, every_cut(path, family))
    assert list(differences(Whole(plain, family), chain, RAGGED)) == []


@pytest.mark.parametrize("name", TRAILERS)
def test_the_trailer_costs_nothing(tiny: Tiny, family_of: FamilyOf, name: str) -> None:
    """A profile is the same with trailer and without."""
    checkpoint, plain = (family_of(tiny(n)).open(tiny(n)) for n in (name, "deepseek_v3"))
    family = family_of(tiny(name))
    choice = DtypeChoice(None, "")
    assert profile_checkpoint(checkpoint, family, choice) == profile_checkpoint(
        plain, family, choice
    )


def test_two_counted_trailers(tiny: Tiny, family_of: FamilyOf, tmp_path: Path) -> None:
    """Every trailer at the end goes, told by its tensors and not by its number."""
    again = {
        name.replace("layers.4.", "layers.5."): value
        for name, value in tensors_of(tiny("deepseek_v3_mtp")).items()
        if name.startswith("model.layers.4.")
    }
    path = altered(tiny("deepseek_v3_mtp"), tmp_path, again, {"num_hidden_layers": 6})
    assert family_of(path).open(path).config.num_layers == 4


def test_a_trailer_of_unpacked_experts_decides_no_dtype(
    tiny: Tiny, family_of: FamilyOf, tmp_path: Path
) -> None:
    """Plain half-precision experts that are never read do not make a packed model float32."""
    trailer = {
        name: value.astype(mx.bfloat16)
        for name, value in tensors_of(tiny("deepseek_v3_mtp")).items()
        if name.startswith("model.layers.4.")
    }
    path = altered(tiny("deepseek_v3", quantize="4:32"), tmp_path, trailer)
    assert choose_dtype(family_of(path).open(path), "auto", "cpu").cast is None


@pytest.mark.parametrize("trailer", quick(["", "_mtp"], ["_mtp"]))
def test_more_than_61_layers(
    tmp_path: Path, family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch, trailer: str
) -> None:
    """Layer 61 of 63 is a layer like the others, though mlx-lm takes it for the trailer."""
    config = {
        **RECIPES["deepseek_v3"].config,
        "num_hidden_layers": 63,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    }
    deep = attrs.evolve(RECIPES[f"deepseek_v3{trailer}"], name="deep", config=config)
    monkeypatch.setitem(RECIPES, "deep", deep)  # type: ignore[arg-type]
    path = checkpoints.build("deep", tmp_path)
    family = family_of(path)
    whole = Whole.__new__(Whole)  # mlx-lm's own model runs, but does not read its own layer 61
    whole.model = checkpoints.draw_model("deep")
    whole.table = BatchTable(lambda: list(make_prompt_cache(whole.model)))
    ranges = [range(61), range(61, 62), range(62, 63)]
    scene = Scene((5, 3), steps=2)
    assert list(differences(whole, Chain(path, family, ranges), scene)) == []


# Bytes and dtypes


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_noq", *TRAILERS])
@pytest.mark.parametrize("quantize", [None, "4:32", "4:32:mxfp4"])
def test_bytes(
    tiny: Tiny,
    family_of: FamilyOf,
    assert_planned_bytes: PlannedBytes,
    name: str,
    quantize: str | None,
    stored_and_cast: tuple[str, str | None],
) -> None:
    """The profile's bytes are those of the loaded model."""
    dtype, cast = stored_and_cast
    path = tiny(name, quantize=quantize, dtype=dtype)
    assert_planned_bytes(family_of(path).open(path), family_of(path), cast)


def test_the_bias_of_the_router_is_not_cast(tiny: Tiny, family_of: FamilyOf) -> None:
    """What decides between experts stays float32 under --dtype bfloat16."""
    path = tiny("deepseek_v3")
    stage = load_stage(family_of(path).open(path), family_of(path), 0, 4, "bfloat16")
    kept = {n for n, v in flat_parameters(stage.model).items() if v.dtype == mx.float32}
    assert kept == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3)}


def test_experts_in_half_precision(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU makes plain bfloat16 experts float32, with a notice; asked for, they are refused."""
    path = tiny("deepseek_v3", dtype="bfloat16")
    if mx.default_device().type == mx.DeviceType.gpu:
        pytest.skip("a GPU multiplies them")
    command = ["generate", "-m", str(path), "-p", "abc", "-n", "2", "--pp-size", "2"]
    assert run(command) == 0
    assert "activations: float32, not bfloat16 as stored" in capsys.readouterr().err
    for dtype in ("bfloat16", "float16", "checkpoint"):
        assert run([*command, "--dtype", dtype]) == UnsupportedError.exit_code
        assert f"--dtype {dtype} cannot run this checkpoint" in capsys.readouterr().err


# Packed forms of the hub


def tensors_of(folder: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    return loaded


def altered(
    source: Path,
    out: Path,
    tensors: Mapping[str, mx.array | None] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A copy of ``source`` in ``out``; None takes a tensor away, uint8 is written as float8."""
    weights = {n: v for n, v in (tensors_of(source) | dict(tensors or {})).items() if v is not None}
    return write_checkpoint(
        out,
        {name: TensorSpec(KINDS[value.dtype], value.shape) for name, value in weights.items()},
        lambda name: np.array(mx.contiguous(weights[name]).reshape(-1).view(mx.uint8)).tobytes(),
        config=json.loads((source / "config.json").read_text()) | dict(config or {}),
    )


def float8(source: Path, out: Path) -> Path:
    """The hub's own form: matrices of layers as float8, a scale for each block of 128 x 128."""
    tensors: dict[str, mx.array] = {}
    for number, (name, value) in enumerate(sorted(tensors_of(source).items())):
        if name.startswith("model.layers.") and name.endswith("_proj.weight"):
            blocks = [-(-size // 128) for size in value.shape]
            tensors[name] = mx.to_fp8(value * 100)
            tensors[f"{name}_scale_inv"] = mx.full(blocks, 0.01) + 1e-5 * number
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return altered(source, out, tensors, {"quantization_config": settings})


def packed_integers(source: Path, out: Path) -> Path:
    """Kimi's form: experts as integers of 4 bits around zero, a scale for each 32 of them."""
    tensors: dict[str, mx.array | None] = {}
    for name, value in tensors_of(source).items():
        if ".experts." in name:
            module, (rows, columns) = name.removesuffix(".weight"), value.shape
            scale = mx.abs(value).reshape(rows, -1, 32).max(axis=-1) / 7
            grid = mx.round(value.reshape(rows, -1, 32) / scale[..., None]) + 8
            digits = grid.reshape(rows, -1, 8).astype(mx.uint32)
            words = (digits << mx.arange(0, 32, 4, dtype=mx.uint32)).sum(axis=-1)
            tensors[name] = None
            tensors[f"{module}.weight_packed"] = words.astype(mx.uint32).view(mx.int32)
            tensors[f"{module}.weight_scale"] = scale
            tensors[f"{module}.weight_shape"] = mx.array([rows, columns], mx.int32)
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return altered(source, out, tensors, {"quantization_config": settings})


def packed_keys_and_values(source: Path, out: Path) -> Path:
    """A conversion from before mlx-lm split ``kv_b_proj``, which now has to pack it again."""
    tensors: dict[str, mx.array] = {}
    for name, value in tensors_of(source).items():
        if name.endswith(".kv_b_proj.weight"):
            module = name.removesuffix(".weight")
            parts = mx.quantize(value, group_size=32, bits=4)
            tensors |= {
                f"{module}.{part}": array
                for part, array in zip(("weight", "scales", "biases"), parts, strict=True)
            }
    return altered(source, out, tensors, {"quantization": {"group_size": 32, "bits": 4}})


@pytest.mark.parametrize("pack", [float8, packed_integers, packed_keys_and_values])
@pytest.mark.parametrize("name", quick(["deepseek_v3", "deepseek_v3_mtp"], ["deepseek_v3"]))
def test_packed_forms(
    tiny: Tiny,
    family_of: FamilyOf,
    assert_planned_bytes: PlannedBytes,
    tmp_path: Path,
    pack: Callable[[Path, Path], Path],
    name: str,
) -> None:
    """What sanitize unpacks or packs again is split like mlx-lm's and takes the planned bytes."""
    path, plain = pack(tiny(name), tmp_path / name), pack(tiny("deepseek_v3"), tmp_path / "plain")
    family = family_of(path)
    checkpoint = family.open(path)
    choice = choose_dtype(checkpoint, "auto", "cpu")
    assert choice.cast == ("float32" if pack is float8 else None)
    chain = Chain(path, family, every_cut(path, family), choice.cast)
    assert list(differences(Whole(plain, family, choice.cast), chain, RAGGED)) == []
    for cast in (None, "float32", "bfloat16"):
        assert_planned_bytes(checkpoint, family, cast)


def test_packed_integers_work_as_what_they_stand_for(
    tiny: Tiny, family_of: FamilyOf, tmp_path: Path
) -> None:
    """A packed expert multiplies as much as the plain one."""
    plain, packed = tiny("deepseek_v3"), packed_integers(tiny("deepseek_v3"), tmp_path)
    family, choice = family_of(plain), DtypeChoice(None, "")
    first, second = (profile_checkpoint(family.open(p), family, choice) for p in (plain, packed))
    assert [layer.work for layer in first.layers] == [layer.work for layer in second.layers]


# Greedy tokens


@pytest.mark.parametrize("quantize", [None, "4:32"])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_noq"])
def test_generate(
    tiny: Tiny, assert_greedy_parity: Callable[[Path, str], None], name: str, quantize: str | None
) -> None:
    """mlxcel generate gives mlx-lm's greedy tokens, a ragged batch those of single runs."""
    assert_greedy_parity(tiny(name, quantize=quantize), "0-0,1-2,3-3")
