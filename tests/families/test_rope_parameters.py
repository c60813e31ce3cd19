"""Rotary positions in the form of transformers 5, which most of mlx-lm's classes do not know."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcel.engine.slot import prompt_work
from mlxcel.errors import CheckpointError
from mlxcel.family import Family
from mlxcel.partition.consistency import oddities
from mlxcel.stage.load import load_stage
from mlxcel.testing.quick import quick
from mlxcel.testing.split import HANDLE, Scene, check_split, one_stage

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]

FLAT = (
    "deepseek_v3",
    "ernie4_5",
    "ernie4_5_moe",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "hunyuan_v1_dense",
    "llama",
    "llama4",
    "llama_sliding",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
)
BY_TYPE = ("gemma3", "gemma3_text")
SCENE = Scene((17,), steps=2)


def moved(settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` in place, as transformers 5 writes them."""
    rope = {"rope_theta": settings.pop("rope_theta"), "rope_type": "default"}
    if scaling := settings.pop("rope_scaling", None):
        rope |= {key: value for key, value in scaling.items() if key != "type"}
        rope["rope_type"] = scaling.get("rope_type") or scaling["type"]
    if (local := settings.pop("rope_local_base_freq", None)) is not None:
        plain = {"rope_theta": local, "rope_type": "default"}
        settings["rope_parameters"] = {"full_attention": rope, "sliding_attention": plain}
        return settings
    if (partial := settings.pop("partial_rotary_factor", None)) is not None:
        rope["partial_rotary_factor"] = partial
    settings["rope_parameters"] = rope
    return settings


def changed(path: Path, out: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the checkpoint at ``path`` with ``change`` made to its text settings."""
    shutil.copytree(path, out)
    config = json.loads((out / "config.json").read_text())
    change(config.get("text_config", config))
    (out / "config.json").write_text(json.dumps(config))
    return out


def logits(path: Path, family: Family) -> mx.array:
    """What one stage makes of a prompt, the last token's [1, 1, vocab]."""
    model = one_stage(path, family)
    *_, last = [
        model.run(HANDLE, work)
        for work in prompt_work(HANDLE, SCENE.prompts(), 512, itertools.count(1))
    ]
    return last


@pytest.mark.parametrize("name", quick((*FLAT, *BY_TYPE), ("glm4", "mixtral", "gemma3_text")))
def test_both_forms_are_one_model(
    tiny: Tiny, family_of: FamilyOf, tmp_path: Path, name: str
) -> None:
    """The new form gives the old one's logits to the last bit, whole and split at every layer."""
    old = changed(tiny(name), tmp_path / "old", lambda text: text.update(rope_theta=321.0))
    new = changed(old, tmp_path / "new", moved)
    family = family_of(new)
    assert mx.array_equal(logits(new, family), logits(old, family)).item()
    assert not mx.array_equal(logits(new, family), logits(tiny(name), family)).item()
    assert check_split(new, family, scenes=[SCENE], reference=one_stage) == []


def test_given_fields_stay(tiny: Tiny, family_of: FamilyOf, tmp_path: Path) -> None:
    """A field that config.json has is never taken from rope_parameters."""
    path = tiny("llama")
    both = changed(
        path, tmp_path / "both", lambda text: text.update(rope_parameters={"rope_theta": 321.0})
    )
    assert mx.array_equal(logits(both, family_of(both)), logits(path, family_of(path))).item()


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("llama", 5, "rope_parameters is 5, not an object"),
        ("llama", {"chunked_attention": {"rope_theta": 1.0}}, "'chunked_attention'"),
        ("llama", {"full_attention": {"rope_theta": 9.0}, "rope_theta": 1.0}, "'rope_theta'"),
        (
            "mistral",
            {"full_attention": {"rope_theta": 9.0}, "sliding_attention": {"rope_theta": 8.0}},
            "differ for full_attention and sliding_attention, and mlx-lm's model of this type has "
            "no field for that",
        ),
        ("llama", {"full_attention": {}}, "says nothing of full_attention or sliding_attention"),
        ("llama", {"full_attention": None, "sliding_attention": None}, "says nothing of full_att"),
        (
            "gemma3",
            {
                "full_attention": {"rope_theta": 9.0},
                "sliding_attention": {"rope_theta": 8.0, "rope_type": "linear", "factor": 2.0},
            },
            "rope_parameters of sliding_attention must be a plain rope_theta",
        ),
    ],
)
def test_what_cannot_be_said_is_refused(
    tiny: Tiny, family_of: FamilyOf, tmp_path: Path, name: str, parameters: Any, said: str
) -> None:
    """What mlx-lm's class has no fields for is refused by name and not left out."""

    def change(text: dict[str, Any]) -> None:
        del text["rope_theta"]
        text.pop("rope_scaling", None)
        text["rope_parameters"] = parameters

    path = changed(tiny(name), tmp_path / "odd", change)
    family = family_of(path)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_stage(family.open(path), family, 0, 1, None)
    assert "config.json" in str(caught.value)


def test_layers_that_rotate_alike(tiny: Tiny, family_of: FamilyOf, tmp_path: Path) -> None:
    """Types of layers with the same settings need one field only."""
    rope = {"rope_theta": 321.0, "rope_type": "default"}

    def change(text: dict[str, Any]) -> None:
        del text["rope_theta"]
        text["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}

    by_type = changed(tiny("mistral"), tmp_path / "by_type", change)
    one = changed(tiny("mistral"), tmp_path / "one", lambda text: text.update(rope_theta=321.0))
    assert mx.array_equal(logits(by_type, family_of(one)), logits(one, family_of(one))).item()


@pytest.mark.parametrize("absent", [None, {}])
def test_a_type_that_says_nothing(
    tiny: Tiny, family_of: FamilyOf, tmp_path: Path, absent: dict[str, Any] | None
) -> None:
    """A type of layers that is null or empty is that of all layers."""

    def change(text: dict[str, Any]) -> None:
        del text["rope_theta"]
        rope = {"rope_theta": 321.0, "rope_type": "default"}
        text["rope_parameters"] = {"full_attention": rope, "sliding_attention": absent}

    half = changed(tiny("llama"), tmp_path / "half", change)
    one = changed(tiny("llama"), tmp_path / "one", lambda text: text.update(rope_theta=321.0))
    assert mx.array_equal(logits(half, family_of(one)), logits(one, family_of(one))).item()


def test_notices_of_what_cannot_be_built(tiny: Tiny, family_of: FamilyOf, tmp_path: Path) -> None:
    """What is told of a checkpoint leaves malformed rope_parameters to whoever builds the model."""
    parameters = {"full_attention": {}}
    path = changed(
        tiny("mixtral"), tmp_path / "odd", lambda text: text.update(rope_parameters=parameters)
    )
    family = family_of(path)
    assert oddities(family.open(path), family) == ()


YARN = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "name",
    [name for name in FLAT if name not in ("hunyuan_v1_dense", "qwen2_moe")]
    + ["glm4_moe_lite", *BY_TYPE],
)
@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_rescaled_positions_are_used_or_told(
    tiny: Tiny, family_of: FamilyOf, tmp_path: Path, name: str, form: str
) -> None:
    """Either the model computes something else with YaRN, or a notice names the field."""

    def scale(text: dict[str, Any]) -> None:
        text["rope_scaling"] = YARN
        if form == "rope_parameters":
            moved(text)

    def plain(text: dict[str, Any]) -> None:
        text["rope_scaling"] = None

    scaled = changed(tiny(name), tmp_path / "scaled", scale)
    unscaled = changed(tiny(name), tmp_path / "unscaled", plain)
    family = family_of(scaled)
    same = mx.array_equal(logits(scaled, family), logits(unscaled, family)).item()
    told = f"does not read {form}" in "".join(oddities(family.open(scaled), family))
    assert told == same
    assert oddities(family.open(unscaled), family) == ()


NEVER_SLIDE = ("mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
SLIDES = {"sliding_window": 8, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("mistral", {"layer_types": None}, True),
        ("mistral", {}, False),
        ("mixtral", {"sliding_window": 8}, True),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, False),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, True),
        ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}, True),
        *((name, SLIDES | {"layer_types": ["sliding_attention"]}, True) for name in NEVER_SLIDE),
        *((name, SLIDES | {"layer_types": ["full_attention"]}, False) for name in NEVER_SLIDE),
        ("qwen2", SLIDES | {"max_window_layers": 99}, False),
        ("qwen2_moe", SLIDES | {"max_window_layers": 99}, False),
        ("qwen3", SLIDES | {"max_window_layers": 99}, False),
        ("qwen3", SLIDES | {"max_window_layers": 1}, True),
        ("qwen3_moe", SLIDES | {"max_window_layers": 99}, True),
        ("mixtral", SLIDES | {"max_window_layers": 99}, True),
    ],
)
def test_windows_that_are_not_used_are_told(
    tiny: Tiny,
    family_of: FamilyOf,
    tmp_path: Path,
    name: str,
    settings: dict[str, Any],
    told: bool,
) -> None:
    """mlx-lm's class of Mistral slides where layer_types says so; those of the others never do."""
    path = changed(tiny(name), tmp_path / "window", lambda text: text.update(settings))
    family = family_of(path)
    notices = "".join(oddities(family.open(path), family))
    assert ("does not read sliding_window" in notices) == told
