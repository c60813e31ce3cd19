"""The tensor-parallel plan of every family: it covers the model, cuts it up, and is true."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxcel.errors import UnsupportedError
from mlxcel.family import Family
from mlxcel.family.transformer import flat_parameters
from mlxcel.plugins import Plugins
from mlxcel.tensor.plan import CommPattern, ShardPlan
from mlxcel.tensor.shard import ShardStrategy
from mlxcel.testing.survey.finding import served_by

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]

NAMES = (
    "deepseek_v3",
    "deepseek_v3_noq",
    "ernie4_5",
    "ernie4_5_moe",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "gemma4_text",
    "gemma4_vlm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss_plain",
    "hunyuan_v1_dense",
    "jamba",
    "kimi_k3",
    "kimi_k3_plain",
    "llama",
    "llama4",
    "llama_tied",
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
TWO_STATES = ("nemotron_h", *(name for name in NAMES if name.startswith(("qwen3_5", "qwen3_next"))))
"""Their recurrent layers have two heads of keys, or two groups."""

RANKS = 2
TOLERANCE = 1e-3


@pytest.fixture
def plan_and_model(tiny: Tiny, family_of: FamilyOf) -> Callable[..., tuple[ShardPlan, nn.Module]]:
    """Makes the plan of a tiny checkpoint from its config, and mlx-lm's model with its weights."""

    def make(name: str, quantize: str | None = None) -> tuple[ShardPlan, nn.Module]:
        path = tiny(name, quantize=quantize)
        family = family_of(path)
        checkpoint = family.open(path)
        if quantize is None:
            return family.shard_plan(checkpoint.config), _loaded(path, family)
        return family.shard_plan(checkpoint.config), load_model(path)[0]

    return make


def _loaded(path: Path, family: Family) -> nn.Module:
    from mlxcel.stage.load import load_stage

    checkpoint = family.open(path)
    return load_stage(checkpoint, family, 0, checkpoint.config.num_layers, None).model


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_once(
    plan_and_model: Callable[..., tuple[ShardPlan, nn.Module]], name: str
) -> None:
    """The plan has each parameter of mlx-lm's model, and no other; two ranks can share it."""
    plan, model = plan_and_model(name)
    shapes = {path: value.shape for path, value in flat_parameters(model).items()}
    assert {path: p.shape for path, p in plan.parameters.items()} == shapes
    assert list(plan.obstacles(RANKS)) == []
    assert plan.divides(4) == (name not in TWO_STATES)


@pytest.mark.parametrize("quantize", [None, "4:32"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt_oss_plain"])
def test_cut_and_put_together(
    plan_and_model: Callable[..., tuple[ShardPlan, nn.Module]], name: str, quantize: str | None
) -> None:
    """The ranks' parts of a parameter, segment by segment, are the parameter."""
    plan, model = plan_and_model(name, quantize)
    for path, value in flat_parameters(model).items():
        shard, whole = plan.shard_of(path), np.array(value.astype(mx.float32))
        if shard.strategy in (ShardStrategy.REPLICATED, ShardStrategy.VOCAB):
            continue
        size = whole.shape[shard.axis]
        parts = [shard.parts(size, rank, RANKS) for rank in range(RANKS)]
        order = [row for segment in zip(*parts, strict=True) for part in segment for row in part]
        if shard.repeats and len(set(order)) < len(order):
            assert sorted(set(order)) == list(range(size)), path
            continue
        assert len({len(list(itertools.chain(*part))) for part in parts}) == 1, path
        assert np.array_equal(np.take(whole, order, shard.axis), whole), path


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_are_one(
    plan_and_model: Callable[..., tuple[ShardPlan, nn.Module]], name: str
) -> None:
    """Ranks made by the plan, their blocks added where it says so, give the model's logits."""
    plan, model = plan_and_model(name)
    ranks = [rank_of(plan, copy.deepcopy(model), rank) for rank in range(RANKS)]
    expected = list(logits(model, make_prompt_cache(model)))
    together = copy.deepcopy(model)
    for communication in plan.communications:
        if communication.pattern is CommPattern.ALL_REDUCE and ".layers." in communication.path:
            parts = [module_at(rank, communication.path) for rank in ranks]
            replace(together, communication.path, Sum(parts))
    caches = [EachRank(cache) for cache in make_prompt_cache(model)]
    for one, two in zip(expected, logits(together, caches), strict=True):
        assert mx.max(mx.abs(one - two)).item() <= TOLERANCE


def test_no_plan_for_what_nobody_knows(plugins: Plugins, tmp_path: Path) -> None:
    """An architecture of the generic family is split over stages only."""
    from mlxcel.checkpoint.config import read_config

    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    _, family = served_by("gpt2", plugins)
    with pytest.raises(UnsupportedError, match="gpt2 model cannot be split over ranks"):
        family.shard_plan(read_config(tmp_path))


def rank_of(plan: ShardPlan, model: nn.Module, rank: int) -> nn.Module:
    """What ``rank`` holds, in the place of the whole ``model``."""
    own = []
    for path, value in flat_parameters(model).items():
        shard, (module, owner) = plan.shard_of(path), modules_of(model, path)
        if shard.once and rank:
            value = mx.zeros_like(value)
        if shard.strategy in (ShardStrategy.COLUMN, ShardStrategy.ROW):
            parts = shard.parts(value.shape[shard.axis], rank, RANKS)
            rows = mx.array([row for part in parts for row in part])
            value = mx.take(value, rows, axis=shard.axis)
        own.append((path, value))
        counting = [(m, a) for a in shard.counted for m in (module, owner) if hasattr(m, a)]
        assert bool(counting) == bool(shard.counted), path
        for counter, attribute in counting:
            setattr(counter, attribute, max(1, getattr(counter, attribute) // RANKS))
    model.update(tree_unflatten(own))
    return model


def modules_of(model: nn.Module, path: str) -> tuple[Any, Any]:
    """The module that has the parameter ``path``, and that module's owner."""
    module = path.rpartition(".")[0]
    return module_at(model, module), module_at(model, module.rpartition(".")[0])


def module_at(model: nn.Module, path: str) -> Any:
    found: Any = model
    for step in filter(None, path.split(".")):
        found = found[int(step)] if step.isdecimal() else getattr(found, step)
    return found


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(module_at(model, owner), name, module)


class EachRank:
    """The ranks' caches of one layer; outside of what is split, it is the first one."""

    def __init__(self, cache: Any) -> None:
        self.ranks = [copy.deepcopy(cache) for _ in range(RANKS)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["ranks"][0], name)

    def __getitem__(self, index: int) -> Any:
        return self.ranks[0][index]

    def __setitem__(self, index: int, value: Any) -> None:
        self.ranks[0][index] = value

    def maybe_trim_front(self) -> None:
        for cache in self.ranks:
            cache.maybe_trim_front()


class Sum(nn.Module):
    """The ranks' blocks, each with its own cache, added up."""

    def __init__(self, ranks: list[nn.Module]) -> None:
        super().__init__()
        self.ranks = ranks

    def __getattr__(self, name: str) -> Any:
        if "ranks" in self and name != "ranks":
            return getattr(self["ranks"][0], name)
        return super().__getattr__(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outs = []
        for rank, block in enumerate(self.ranks):
            own = {name: _of_rank(value, rank) for name, value in kwargs.items()}
            outs.append(block(*(_of_rank(value, rank) for value in args), **own))
        if isinstance(outs[0], tuple):  # Gemma 4: with keys and values, and where they begin
            total = outs[0][0]
            for out in outs[1:]:
                total = total + out[0]
            return total, Shared([out[1] for out in outs]), outs[0][2]
        total = outs[0]
        for out in outs[1:]:
            total = total + out
        return total


class Shared(list[Any]):
    """Keys and values of each rank."""


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, EachRank):
        return value.ranks[rank]
    return value[rank] if isinstance(value, Shared) else value


def logits(model: nn.Module, caches: list[Any]) -> Iterator[mx.array]:
    """Of a prompt and of three tokens after it."""
    for tokens in ([(17 * i) % 251 for i in range(11)], [5], [77], [9]):
        yield model(mx.array([tokens]), cache=caches)
