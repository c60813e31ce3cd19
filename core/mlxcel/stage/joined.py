"""From the ranks of a stage, each built like the whole of it, to one stage that runs them all."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.nn as nn

from mlxcel.family.transformer import TransformerStage
from mlxcel.stage.expert_parallel import ExpertParallel
from mlxcel.stage.rank_caches import RankCaches
from mlxcel.stage.together import Joint, Together
from mlxcel.stage.vocab_parallel import VocabParallelEmbedding, VocabParallelHead
from mlxcel.tensor.plan import ShardPlan
from mlxcel.tensor.shard import ShardStrategy


def narrow(stage: TransformerStage, plan: ShardPlan, names: Mapping[str, str], ranks: int) -> None:
    """Let the modules of ``stage`` count only a rank's heads, groups and channels.

    Args:
        names: The stage's parameters: their names here, and in the whole model.
    """
    for local, name in names.items():
        if name not in plan.parameters:
            continue  # scales and biases stand beside a weight that counts
        for attribute in plan.parameters[name].shard.counted:
            module = _owner(local)
            for holder in (_at(stage.model, module), _at(stage.model, _owner(module))):
                if hasattr(holder, attribute):
                    setattr(holder, attribute, max(1, getattr(holder, attribute) // ranks))


def join(
    stages: Sequence[TransformerStage], plan: ShardPlan, names: Mapping[str, str], joint: Joint
) -> TransformerStage:
    """The first of ``stages``, its shared blocks put together with those of the others.

    Args:
        stages: One for each rank of this worker, all loaded.
        names: See :func:`narrow`.
    """
    whole = stages[0]
    for path in _expert_stacks(plan, names):
        for stage, rank in zip(stages, joint.ranks, strict=True):
            stack = _at(stage.model, path)
            _replace(stage.model, path, ExpertParallel(stack, rank, joint.size))
    present = {_owner(local) for local in names}
    for communication in plan.communications:
        local = whole.local_name(communication.path)
        if local is None or not any(f"{module}.".startswith(f"{local}.") for module in present):
            continue  # of another stage
        if (weight := f"{communication.path}.weight") in plan.parameters:
            # Of others, the block around them takes care: it runs in step.
            if plan.shard_of(weight).strategy is ShardStrategy.VOCAB:
                _share_vocabulary(stages, local, plan.parameters[weight].shape[0], joint)
            continue
        blocks = [_at(stage.model, local) for stage in stages]
        if len(stages) > 1 and _takes_a_cache(blocks[0]):
            whole.change_cache(local, lambda cache: RankCaches([cache] * len(stages)))
        _replace(whole.model, local, Together(blocks, joint))
    return whole


def _expert_stacks(plan: ShardPlan, names: Mapping[str, str]) -> list[str]:
    """The modules, by their names here, of which every rank has whole experts."""
    stacked = (
        _owner(_owner(local))
        for local, name in names.items()
        if plan.shard_of(name).strategy is ShardStrategy.EXPERT
    )
    return list(dict.fromkeys(stacked))


def _share_vocabulary(
    stages: Sequence[TransformerStage], path: str, rows: int, joint: Joint
) -> None:
    """Put the ranks' shares of an embedding or of a head together, once."""
    parts = [_at(stage.model, path) for stage in stages]
    if isinstance(parts[0], VocabParallelEmbedding | VocabParallelHead):
        return  # a tied table communicates twice
    if hasattr(parts[0], "as_linear"):
        starts = [rank * rows // joint.size for rank in joint.ranks]
        _replace(stages[0].model, path, VocabParallelEmbedding(parts, starts, rows, joint))
    else:
        _replace(stages[0].model, path, VocabParallelHead(parts, rows, joint))


def _takes_a_cache(block: nn.Module) -> bool:
    """Whether a layer gives its cache to ``block``, as layers do with what mixes positions."""
    return "cache" in inspect.signature(block.__call__).parameters


def _owner(path: str) -> str:
    return path.rpartition(".")[0]


def _at(model: nn.Module, path: str) -> Any:
    found: Any = model
    for step in filter(None, path.split(".")):
        found = found[int(step)] if step.isdecimal() else getattr(found, step)
    return found


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(_at(model, owner), name, module)
