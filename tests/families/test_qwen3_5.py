"""The Qwen 3.5 family: recurrent layers, norms stored without their 1, tensors nobody reads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.config import read_config
from mlxcel.family import Family
from mlxcel.family.choose import choose_family
from mlxcel.family.transformer import Mask, flat_parameters
from mlxcel.plugins import Plugins
from mlxcel.stage.load import load_stage
from mlxcel.testing.split import Chain, Scene, Whole, check_split, differences, drawn_cut, every_cut

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]

RAGGED = Scene((17, 5, 11))
every_checkpoint = pytest.mark.parametrize(
    ("name", "quantize"), list(itertools.product(["qwen3_5", "qwen3_5_vlm"], [None, "4:32"]))
)


@every_checkpoint
def test_split_at_every_layer(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None
) -> None:
    """Cut at every boundary, every logit is the whole model's to the last bit."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    assert len(every_cut(path, family)) == 8
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
    """Half precision is no less identical; the decay stays float32 in both."""
    path = tiny("qwen3_5", dtype="bfloat16")
    assert check_split(path, family_of(path), scenes=[RAGGED]) == []


def test_a_stage_of_recurrent_layers_only(tiny: Tiny, family_of: FamilyOf) -> None:
    """A stage without any attention layer runs like the others."""
    path = tiny("qwen3_5")
    family = family_of(path)
    ranges = [range(4), range(4, 7), range(7, 8)]
    middle = Chain(path, family, ranges).stages[1]
    assert middle.masks == [Mask("ssm")] * 3
    assert check_split(path, family, ranges) == []


def test_prompts_of_one_token(tiny: Tiny, family_of: FamilyOf) -> None:
    """Rows without any prefill have no recurrent state yet when they are merged."""
    path = tiny("qwen3_5")
    scenes = [Scene((1, 12, 5)), Scene((1, 1)), Scene((1,))]
    assert check_split(path, family_of(path), scenes=scenes) == []


def test_a_stage_without_convolutions_gets_its_norms_right(tiny: Tiny, family_of: FamilyOf) -> None:
    """Whether a norm lacks its 1 shows in convolutions only, and this stage has none."""
    path = tiny("qwen3_5")
    family = family_of(path)
    [alone] = Chain(path, family, [range(3, 4)]).stages
    whole = flat_parameters(load_model(path)[0])
    name = "language_model.model.layers.{}.input_layernorm.weight"
    assert mx.array_equal(flat_parameters(alone.model)[name.format(0)], whole[name.format(3)])
    stored = mx.load(str(path / "model.safetensors"))
    unsanitized = stored["model.language_model.layers.3.input_layernorm.weight"]
    assert mx.array_equal(whole[name.format(3)], unsanitized + 1)


def test_what_is_never_read(tiny: Tiny, family_of: FamilyOf, plugins: Plugins) -> None:
    """Vision tower and draft layers are in no stage; the logits are those of the text tower."""
    path = tiny("qwen3_5_vlm")
    name, family = choose_family(read_config(path), plugins)
    assert name == "qwen3_5_vlm"
    checkpoint = family.open(path)
    unused = checkpoint.tensors.keys() - checkpoint.loaded.keys()
    assert {name.split(".")[0] for name in unused} == {"model", "mtp"}
    assert all(name.startswith(("model.visual.", "mtp.")) for name in unused)
    chain = Chain(path, family, every_cut(path, family))
    for stage in chain.stages:
        for parameter, value in flat_parameters(stage.model).items():
            assert not mx.isnan(value).any().item(), parameter
    assert list(differences(Whole(tiny("qwen3_5"), family), chain, RAGGED)) == []


def test_the_text_model_alone(tiny: Tiny, family_of: FamilyOf, tmp_path: Path) -> None:
    """A checkpoint of model_type qwen3_5_text, which mlx-lm has no module for, runs too."""
    whole = tiny("qwen3_5")
    config = json.loads((whole / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config["text_config"]))
    weights = mx.load(str(whole / "model.safetensors"))
    renamed = {n.replace("model.language_model.", "model."): v for n, v in weights.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed)
    family = family_of(tmp_path)
    chain = Chain(tmp_path, family, every_cut(tmp_path, family))
    assert list(differences(Whole(whole, family), chain, RAGGED)) == []


@pytest.mark.parametrize("quantize", [None, "4:32", "4:32:mxfp4"])
def test_bytes(
    tiny: Tiny,
    family_of: FamilyOf,
    assert_planned_bytes: Callable[[Checkpoint, Family, str | None], None],
    quantize: str | None,
    stored_and_cast: tuple[str, str | None],
) -> None:
    """The profile's bytes are those of the loaded model."""
    dtype, cast = stored_and_cast
    path = tiny("qwen3_5_vlm", quantize=quantize, dtype=dtype)
    assert_planned_bytes(family_of(path).open(path), family_of(path), cast)


def test_the_decay_is_not_cast(tiny: Tiny, family_of: FamilyOf) -> None:
    """The logarithm of the decay stays float32 under --dtype bfloat16."""
    path = tiny("qwen3_5")
    stage = load_stage(family_of(path).open(path), family_of(path), 0, 4, "bfloat16")
    kept = {n for n, v in flat_parameters(stage.model).items() if v.dtype == mx.float32}
    assert {name.split(".", 4)[4] for name in kept} == {"linear_attn.A_log"}
    assert len(kept) == 3


@pytest.mark.parametrize("quantize", [None, "4:32"])
def test_generate(
    tiny: Tiny, assert_greedy_parity: Callable[[Path, str], None], quantize: str | None
) -> None:
    """mlxcel generate gives mlx-lm's greedy tokens, a ragged batch those of single runs."""
    assert_greedy_parity(tiny("qwen3_5", quantize=quantize), "0-2,3-4,5-7")
