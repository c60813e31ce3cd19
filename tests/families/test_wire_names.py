"""Every wire name: a tiny checkpoint that goes by it, loads as planned, and runs in processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.config import read_config
from mlxcel.engine.generation import Generation
from mlxcel.engine.local import Workers, open_model, running
from mlxcel.engine.model import Model
from mlxcel.engine.slot import Request, credits_for
from mlxcel.family import Family
from mlxcel.family.choose import choose_family
from mlxcel.plugins import Plugins
from mlxcel.testing.split import drawn_cut

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]

NAMES = (
    "deepseek_v3",
    "ernie4_5",
    "ernie4_5_moe",
    "gemma3",
    "gemma4_text",
    "gemma4_vlm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "hunyuan_v1_dense",
    "jamba",
    "kimi_k3",
    "llama",
    "llama4",
    "mistral",
    "mixtral",
    "nemotron_h",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_vlm",
    "qwen3_5_vlm",
    "qwen3_moe",
    "qwen3_next",
)
WIRE_NAMES = {name: name for name in NAMES} | {"gemma4_text": "gemma4"}
"""A tiny checkpoint for each wire name."""

FAST = {("mistral", None), ("glm_moe_dsa", "4:32"), ("nemotron_h", None)}
"""One dense, one with experts, one with states; the others are slow tests."""

REQUESTS = [
    Request(i, tuple((13 * i + 7 * j) % 250 for j in range(n)), 6)
    for i, n in enumerate((17, 5, 11))
]


def test_every_wire_name_has_a_checkpoint(tiny: Tiny, plugins: Plugins) -> None:
    """There is one for each name that an installed family of mlxcel's own goes by."""
    found = {name: choose_family(read_config(tiny(name)), plugins)[0] for name in NAMES}
    assert found == WIRE_NAMES
    own = {
        record.name
        for record in plugins.records("family")
        if record.distribution.startswith("mlxcel-") and record.name != "generic"
    }
    assert own == set(WIRE_NAMES.values())


@pytest.mark.parametrize("quantize", [None, "4:32"], ids=["hub", "converted"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_as_planned(
    tiny: Tiny,
    family_of: FamilyOf,
    assert_planned_bytes: Callable[[Checkpoint, Family, str | None], None],
    name: str,
    quantize: str | None,
) -> None:
    """The hub's layout and mlx-lm's converted one load, and every stage holds what was planned."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    assert_planned_bytes(family.open(path), family, None)


def tokens(model: Model, workers: Workers) -> dict[int, list[int | None]]:
    """The greedy tokens of REQUESTS, which go through the stages as one batch."""
    made: dict[int, list[int | None]] = {request.index: [] for request in REQUESTS}
    credits = credits_for(3, len(model.plan.stages), 3)
    with running(model, credits=credits, timeout=120, workers=workers) as pipeline:
        for token in Generation(pipeline, REQUESTS, end_tokens=(), rows=3, chunk=8):
            made[token.index].append(token.token)
    return made


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        pytest.param(name, quantize, marks=[] if (name, quantize) in FAST else pytest.mark.slow)
        for name in NAMES
        for quantize in (None, "4:32")
    ],
)
def test_three_processes(
    tiny: Tiny, family_of: FamilyOf, plugins: Plugins, name: str, quantize: str | None
) -> None:
    """A ragged batch through three worker processes makes the tokens of one stage."""
    path = tiny(name, quantize=quantize)
    cut = drawn_cut(path, family_of(path), 3, seed=0)
    layers = ",".join(f"{r.start}-{r.stop - 1}" for r in cut)
    whole = open_model(path, plugins, weights="quantized")
    split = open_model(path, plugins, weights="quantized", layers=layers)
    assert tokens(split, "process") == tokens(whole, "thread")
