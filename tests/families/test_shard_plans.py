"""The tensor-parallel plan of every family: it covers the model and cuts it up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlxcel.checkpoint.config import read_config
from mlxcel.errors import UnsupportedError
from mlxcel.family import Family
from mlxcel.family.transformer import flat_parameters
from mlxcel.plugins import Plugins
from mlxcel.stage.load import load_stage
from mlxcel.tensor.options import TensorParallel
from mlxcel.tensor.plan import ShardPlan
from mlxcel.tensor.shard import Shard, ShardStrategy
from mlxcel.testing.survey.finding import served_by
from mlxcel.testing.tiny import models

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]

NAMES = tuple(name for name in models() if name != "gpt_oss")  # its plan is that of the plain one
TWO_STATES = ("nemotron_h", *(name for name in NAMES if name.startswith(("qwen3_5", "qwen3_next"))))
"""Their recurrent layers have two heads of keys, or two groups."""

RANKS = 2
MODES = (
    TensorParallel(RANKS),
    TensorParallel(RANKS, moe="within_expert", embedding="vocab_parallel", head="vocab_parallel"),
)

PlanAndValues = Callable[..., tuple[ShardPlan, dict[str, mx.array]]]


@pytest.fixture
def plan_and_values(tiny: Tiny, family_of: FamilyOf) -> PlanAndValues:
    """Makes the plan of a tiny checkpoint from its config, and the whole model's parameters."""

    def make(
        name: str, options: TensorParallel, quantize: str | None = None
    ) -> tuple[ShardPlan, dict[str, mx.array]]:
        path = tiny(name, quantize=quantize)
        family = family_of(path)
        checkpoint = family.open(path)
        whole = load_stage(checkpoint, family, 0, checkpoint.config.num_layers, None)
        return family.shard_plan(checkpoint.config, options), flat_parameters(whole.model)

    return make


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_once(plan_and_values: PlanAndValues, name: str) -> None:
    """The plan has each parameter of mlx-lm's model, and no other; two ranks can share it."""
    plan, values = plan_and_values(name, MODES[0])
    shapes = {path: value.shape for path, value in values.items()}
    assert {path: p.shape for path, p in plan.parameters.items()} == shapes
    assert list(plan.obstacles(RANKS)) == []
    assert plan.divides(4) == (name not in TWO_STATES)


@pytest.mark.parametrize("quantize", [None, "4:32"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt_oss_plain"])
def test_cut_and_put_together(
    plan_and_values: PlanAndValues, name: str, quantize: str | None
) -> None:
    """In every mode, what the ranks hold of a parameter together is the parameter."""
    for options in MODES:
        plan, values = plan_and_values(name, options, quantize)
        for path, value in values.items():
            check_parts(path, plan.shard_of(path), value.shape)


def check_parts(path: str, shard: Shard, shape: tuple[int, ...]) -> None:
    if shard.strategy is ShardStrategy.REPLICATED:
        return
    every = list(range(shape[shard.axis]))
    parts = [shard.parts(len(every), rank, RANKS) for rank in range(RANKS)]
    own = [list(itertools.chain(*part)) for part in parts]
    if shard.repeats and shard.units is not None and shard.units < RANKS:
        assert sorted({row for rows in own for row in rows}) == every, path
        return
    assert sorted(itertools.chain(*own)) == every, path
    if shard.strategy in (ShardStrategy.COLUMN, ShardStrategy.ROW):
        assert len({len(rows) for rows in own}) == 1, path
        segments = zip(*parts, strict=True)
        assert [row for segment in segments for part in segment for row in part] == every, path


def test_what_the_modes_choose(plan_and_values: PlanAndValues) -> None:
    """Experts whole or each in part, tables whole or in part: both modes are in the plan."""
    for options, expert, vocabulary in zip(
        MODES,
        (ShardStrategy.EXPERT, ShardStrategy.COLUMN),
        (ShardStrategy.REPLICATED, ShardStrategy.VOCAB),
        strict=True,
    ):
        plan, _ = plan_and_values("qwen3_moe", options)
        up = "model.layers.0.mlp.switch_mlp.up_proj.weight"
        assert plan.shard_of(up).strategy is expert
        for table in ("model.embed_tokens.weight", "lm_head.weight"):
            assert plan.shard_of(table).strategy is vocabulary


def test_no_plan_for_what_nobody_knows(plugins: Plugins, tmp_path: Path) -> None:
    """An architecture of the generic family is split over stages only."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    _, family = served_by("gpt2", plugins)
    with pytest.raises(UnsupportedError, match="'gpt2' cannot be split over ranks"):
        family.shard_plan(read_config(tmp_path), MODES[0])
