"""How the ranks of each stage share a checkpoint's model, and what they cannot share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, get_args

import attrs

from mlxcel.checkpoint.quantization import Quantization, canonical
from mlxcel.errors import TensorParallelError, UnsupportedError, UsageError
from mlxcel.family.contract import Family
from mlxcel.partition.from_config import packings
from mlxcel.tensor.options import MOST_RANKS, MoeMode, TensorParallel
from mlxcel.tensor.plan import ShardPlan
from mlxcel.tensor.shard import ShardStrategy

if TYPE_CHECKING:
    from mlxcel.checkpoint.checkpoint import Checkpoint

MOE_MODES: tuple[MoeMode, ...] = get_args(MoeMode)


@attrs.frozen
class RankPlan:
    """How the ranks of each stage share a model.

    Attributes:
        shards: What each of them holds of each parameter, and where they talk.
        packed: How parameters are packed; those that are not are left out.
        size: How many ranks there are.
        held: Those that one worker is.
    """

    shards: ShardPlan
    packed: Mapping[str, Quantization]
    size: int
    held: range


def plan_ranks(
    checkpoint: Checkpoint,
    family: Family,
    tensor: TensorParallel,
    *,
    dequantize: bool = False,
    mirrors: bool = False,
    apart: bool = False,
) -> RankPlan:
    """The plan of a model that ``tensor.size`` ranks share; refuse what they cannot share.

    Args:
        dequantize: Whether packed matrices become plain ones, whose groups bind nobody.
        mirrors: Whether stages mirror caches of earlier ones.
        apart: Whether each rank is a worker of its own.

    Raises:
        CheckpointError: config.json lacks a field, or its fields contradict each other.
        UnsupportedError: The family does not say how its layers are split.
        UsageError: The options contradict each other or the model.
        TensorParallelError: So many ranks cannot share the model.
    """
    if mirrors:
        raise UsageError(
            f"--allow-mirrored-kv does not go with --tp-size {tensor.size}: each rank would have "
            f"to mirror other heads.",
            "Leave one of them out.",
        )
    _check_tied(checkpoint, family, tensor)
    shards = _shards(checkpoint, family, tensor)
    packed = _packed(checkpoint, family, shards)
    plan = _with_groups(shards, {} if dequantize else packed)
    if obstacle := next(plan.obstacles(tensor.size), None):
        legal = plan.legal_sizes(MOST_RANKS)
        variants = _variants(checkpoint, family, tensor, packed, dequantize=dequantize)
        otherwise = ((flag, _beyond(other, legal)) for flag, other in variants)
        raise TensorParallelError(
            tensor.size,
            obstacle.parts,
            obstacle.module,
            legal,
            tuple((flag, sizes) for flag, sizes in otherwise if sizes),
        )
    return RankPlan(plan, packed, tensor.size, range(1) if apart else range(tensor.size))


def _check_tied(checkpoint: Checkpoint, family: Family, tensor: TensorParallel) -> None:
    if tensor.embedding == tensor.head or not family.tied(checkpoint.config):
        return
    raise UsageError(
        f"--tp-embedding-mode {tensor.embedding} and --tp-lm-head-mode {tensor.head} contradict "
        f"each other: the output projection of this model is its embedding.",
        "Give both the same mode.",
    )


def _shards(checkpoint: Checkpoint, family: Family, tensor: TensorParallel) -> ShardPlan:
    model = f"A model of type {checkpoint.config.model_type!r}"
    problem = f"{model} cannot be split over ranks (--tp-size)"
    way_out = "Use more pipeline stages instead (--pp-size)."
    try:
        plan = family.shard_plan(checkpoint.config, tensor)
    except UnsupportedError as error:
        raise UnsupportedError(f"{problem}.", way_out) from error
    if all(p.shard.strategy in _OUTSIDE for p in plan.parameters.values()):
        raise UnsupportedError(f"{problem}: its family splits no layer.", way_out)
    return plan


_OUTSIDE = (ShardStrategy.REPLICATED, ShardStrategy.VOCAB)


def _packed(checkpoint: Checkpoint, family: Family, plan: ShardPlan) -> dict[str, Quantization]:
    """How each parameter is packed in this checkpoint.

    MLX's own settings name a default, and the scales say what is packed; for other tools' formats
    the settings say it all.
    """
    quantization = checkpoint.quantization
    shapes = plan.parameters.values()
    found = packings(shapes, checkpoint.config, family, quantization)
    if quantization is None or quantization.method is not None:
        return found
    scales = (name for name in checkpoint.loaded if name.endswith(".scales"))
    modules = {canonical(name.removesuffix(".scales")) for name in scales}
    return {
        name: packing
        for name, packing in found.items()
        if canonical(name.removesuffix(".weight")) in modules
    }


def _with_groups(plan: ShardPlan, packed: Mapping[str, Quantization]) -> ShardPlan:
    groups = {name: packing.group_size for name, packing in packed.items()}
    return attrs.evolve(plan, groups=groups)


def _variants(
    checkpoint: Checkpoint,
    family: Family,
    tensor: TensorParallel,
    packed: Mapping[str, Quantization],
    *,
    dequantize: bool,
) -> Iterator[tuple[str, ShardPlan]]:
    """What one other flag would make of the plan."""
    if packed and not dequantize:
        yield "--weights dequantized", _shards(checkpoint, family, tensor)
    for mode in MOE_MODES:
        if mode != tensor.moe:
            other = _shards(checkpoint, family, attrs.evolve(tensor, moe=mode))
            yield f"--tp-moe-mode {mode}", _with_groups(other, {} if dequantize else packed)


def _beyond(plan: ShardPlan, legal: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in plan.legal_sizes(MOST_RANKS) if size not in legal)
