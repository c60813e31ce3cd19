"""Split equals whole for the families whose layers need little of their own."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcel.checkpoint.config import read_config
from mlxcel.engine.slot import Request, prompt_work
from mlxcel.family import Family
from mlxcel.family.transformer import flat_parameters
from mlxcel.partition.consistency import oddities
from mlxcel.stage.load import load_stage
from mlxcel.testing import tiny as checkpoints
from mlxcel.testing.split import (
    Chain,
    Scene,
    Whole,
    check_split,
    drawn_cut,
    every_cut,
    one_stage,
    unlike_alone,
)
from mlxcel.testing.split import differences as unlike

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]

DENSE = ("ernie4_5", "gemma3", "gemma3_text", "glm4", "hunyuan_v1_dense", "qwen2", "qwen3")
EXPERTS = (
    "ernie4_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "kimi_k3",
    "kimi_k3_plain",
    "mixtral",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_vlm",
    "qwen3_moe",
    "qwen3_next",
)
WRONG_BATCHES = ("nemotron_h",)
"""mlx-lm's own model loses rows of ragged batches; those are compared with one stage."""

NAMES = (*DENSE, *EXPERTS, *WRONG_BATCHES)
BOTH = [
    pytest.param(name, quantize, id=f"{name}-{quantize or 'float32'}")
    for name in NAMES
    for quantize in (None, "4:32")
]
RAGGED = Scene((17, 5, 11), chunk=4)
TOLERANCE = 1e-4


def differences(path: Path, family: Family, name: str) -> list[str]:
    if name in WRONG_BATCHES:
        alone = [Scene((17,)), Scene((17,), chunk=8)]
        staged = check_split(path, family, reference=one_stage)
        return staged + check_split(path, family, scenes=alone)
    return check_split(path, family)


@pytest.mark.parametrize(("name", "quantize"), BOTH)
def test_split_at_every_layer(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None
) -> None:
    """Cut at every boundary, every logit is the uncut model's to the last bit."""
    path = tiny(name, quantize=quantize)
    assert differences(path, family_of(path), name) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_split_into_three(tiny: Tiny, family_of: FamilyOf, name: str, seed: int) -> None:
    """So is every partition into stages of several layers."""
    path = tiny(name)
    family = family_of(path)
    ranges = drawn_cut(path, family, 3, seed)
    assert check_split(path, family, ranges, scenes=[RAGGED], reference=one_stage) == [], ranges


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_batch_are_single_runs(tiny: Tiny, family_of: FamilyOf, name: str) -> None:
    """Each row of a ragged batch is what mlx-lm makes of its prompt alone."""
    path = tiny(name)
    family = family_of(path)
    chain = Chain(path, family, every_cut(path, family))
    for scene in (Scene((17, 5, 11)), RAGGED):
        assert list(unlike_alone(chain, Whole(path, family), scene, TOLERANCE)) == []


@pytest.mark.parametrize("name", ["gpt_oss_plain", *DENSE, *EXPERTS, *WRONG_BATCHES])
def test_hub_naming_gives_the_drawn_parameters(tiny: Tiny, family_of: FamilyOf, name: str) -> None:
    """A stage of all layers reads from the hub's tensors exactly the parameters that were drawn."""
    path = tiny(name)
    family = family_of(path)
    checkpoint = family.open(path)
    stage = load_stage(checkpoint, family, 0, checkpoint.config.num_layers, None)
    found, drawn = flat_parameters(stage.model), flat_parameters(checkpoints.draw_model(name))
    packed = {path for path in drawn if ".experts." in path and name == "gpt_oss"}
    assert found.keys() - packed >= drawn.keys() - packed
    for path_of, value in drawn.items():
        if path_of not in packed:
            assert mx.array_equal(found[path_of], value).item(), path_of


def test_mlx_lm_itself_cannot_read_plain_experts(tiny: Tiny) -> None:
    """mlx-lm refuses the hub's plain gpt-oss experts; when that ends, our renaming can go."""
    from mlx_lm.utils import load_model

    with pytest.raises(ValueError, match="parameters not in model"):
        load_model(tiny("gpt_oss_plain"))


def test_mlx_lm_itself_loses_rows(tiny: Tiny, family_of: FamilyOf) -> None:
    """mlx-lm's own Mamba-2 takes padding for text; when that ends, ours can go."""
    path = tiny("nemotron_h")
    whole = Whole(path, family_of(path))
    wrong = list(unlike_alone(whole, whole, Scene((17, 5, 11)), TOLERANCE))
    assert any(problem.startswith("sequence 1, token 0: ") for problem in wrong)


@pytest.mark.parametrize("lengths", [(17, 5, 11), (5, 17, 11), (1, 12, 5), (9, 1), (1, 1)])
@pytest.mark.parametrize("chunk", [2048, 8, 3])
def test_padding_leaves_recurrent_states_alone(
    tiny: Tiny, family_of: FamilyOf, lengths: tuple[int, ...], chunk: int
) -> None:
    """Rows that end before, at or after a chunk's border, or have one token, lose nothing."""
    path = tiny("nemotron_h")
    family = family_of(path)
    chain = Chain(path, family, every_cut(path, family))
    scene = Scene(lengths, chunk=chunk, steps=4)
    assert list(unlike_alone(chain, Whole(path, family), scene, TOLERANCE)) == []


def test_the_first_layers_of_larger_files(tiny: Tiny, family_of: FamilyOf, tmp_path: Path) -> None:
    """With fewer layers in config.json the first ones load, and one notice names the others."""
    source = tiny("kimi_k3")
    path = tmp_path / "short"
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 4
    (path / "config.json").write_text(json.dumps(config))
    family = family_of(path)
    assert check_split(path, family, scenes=[Scene((17,))], reference=one_stage) == []
    [notice] = oddities(family.open(path), family)
    assert "layers 4-7 are ignored" in notice
    [work] = prompt_work(0, [Request(0, (72,), 1)], 512, itertools.count(1))
    assert mx.isfinite(one_stage(path, family).run(0, work)).all().item()


@pytest.mark.parametrize("key", ["hybrid_override_pattern", "layers_block_type"])
def test_layers_that_only_a_list_counts(
    tiny: Tiny, family_of: FamilyOf, tmp_path: Path, key: str
) -> None:
    """A Nemotron-H may leave its number of layers to the list of them."""
    path = tmp_path / "uncounted"
    shutil.copytree(tiny("nemotron_h"), path)
    config = json.loads((path / "config.json").read_text())
    pattern = config.pop("hybrid_override_pattern")
    assert config.pop("num_hidden_layers") == len(pattern)
    kinds = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    config[key] = pattern if key == "hybrid_override_pattern" else [kinds[k] for k in pattern]
    (path / "config.json").write_text(json.dumps(config))
    family = family_of(path)
    assert family.open(path).config.num_layers == len(pattern)
    scene = Scene((17,), steps=1)
    [whole, again] = [one_stage(p, family) for p in (tiny("nemotron_h"), path)]
    assert list(unlike(whole, again, scene)) == []
    assert check_split(path, family, scenes=[scene], reference=one_stage) == []


@pytest.mark.parametrize("name", ["gemma4", "kimi_k3", "qwen3_5", "qwen3_5_moe_vlm"])
@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("inner", [None, False, True])
def test_the_model_is_tied_where_the_family_says_so(
    tiny: Tiny,
    family_of: FamilyOf,
    tmp_path: Path,
    name: str,
    outer: bool | None,
    inner: bool | None,
) -> None:
    """The text settings decide, then the outer ones, for the plan and for the model alike."""
    config = json.loads((tiny(name) / "config.json").read_text())
    text = config.setdefault("text_config", {**config})
    for settings, tied in ((config, outer), (text, inner)):
        settings.pop("tie_word_embeddings", None)
        if tied is not None:
            settings["tie_word_embeddings"] = tied
    (tmp_path / "config.json").write_text(json.dumps(config))
    family, read = family_of(tmp_path), read_config(tmp_path)
    model: Any = family.stage_class().build_model(read)
    given = outer if inner is None else inner
    assert family.tied(read) == (family.tied_by_default if given is None else given)
    assert family.tied(read) == ("lm_head" not in getattr(model, "language_model", model))


def test_a_stage_without_any_cache(tiny: Tiny, family_of: FamilyOf) -> None:
    """Layers of an MLP or of experts keep nothing, and a stage may consist of them."""
    path = tiny("nemotron_h")
    family = family_of(path)
    ranges = [range(1), range(1, 3), range(3, 8)]
    chain = Chain(path, family, ranges)
    assert chain.stages[1].make_caches() == [None, None]
    assert check_split(path, family, ranges, reference=one_stage) == []


@pytest.mark.parametrize("name", ["qwen3_5_moe_vlm", "gemma3", "glm4_moe", "nemotron_h"])
def test_what_is_not_read_is_no_number(tiny: Tiny, name: str) -> None:
    """The unread tensors of a hub checkpoint are NaN here, so reading one would show."""
    tensors = mx.load(str(tiny(name) / "model.safetensors"))
    assert isinstance(tensors, dict)
    assert any(mx.isnan(value).any().item() for value in tensors.values())
