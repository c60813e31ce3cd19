"""Which layers go where: a plan from a checkpoint's headers and what the user asked for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import attrs

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.dtype import DtypeChoice, activation_bytes, is_quantized
from mlxcel.errors import (
    MemoryBudgetError,
    PartitionError,
    TensorParallelError,
    UnsupportedError,
    UsageError,
)
from mlxcel.family.caches import worker_kind
from mlxcel.family.contract import Family
from mlxcel.partition.assignment import StageAssignment, assign
from mlxcel.partition.balance import BalanceBy, balance
from mlxcel.partition.cache_bytes import Workload
from mlxcel.partition.consistency import check_consistency
from mlxcel.partition.memory import Budgets, MemoryLimits, overrun, validate_partition
from mlxcel.partition.profile import ModelProfile, profile_checkpoint
from mlxcel.partition.ranges import parse_ranges
from mlxcel.partition.rank_plan import RankPlan, plan_ranks
from mlxcel.partition.rank_profile import profile_ranks
from mlxcel.partition.remedies import FLAGS, Wording, fits, remedies
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import ALONE, MOST_RANKS, TensorParallel

MOST_TRIED = 6
"""Numbers of ranks that are looked at for a remedy; each costs as much as a plan."""


@attrs.frozen
class Plan:
    """The stages of one model: the profile of one worker of each, and one assignment per stage.

    ``ranks`` says how the ranks of each stage share it, if there are several.
    """

    profile: ModelProfile
    stages: tuple[StageAssignment, ...]
    ranks: RankPlan | None = None


def make_plan(
    checkpoint: Checkpoint,
    family: Family,
    dtype: DtypeChoice,
    plugins: Plugins,
    *,
    dequantize: bool = False,
    size: int | None = None,
    layers: str | None = None,
    by: BalanceBy = "bytes",
    workload: Workload | None = None,
    limits: MemoryLimits | None = None,
    mirrors: bool = False,
    tensor: TensorParallel = ALONE,
    apart: bool = False,
    wording: Wording = FLAGS,
) -> Plan:
    """Cut a model into stages; nothing is loaded.

    Args:
        dequantize: Whether packed matrices become plain float32 ones.
        size: The number of stages; None is 1, or what ``layers`` implies.
        layers: Inclusive ranges such as ``"0-19,20-39"``; None balances automatically.
        by: What the balancer evens out.
        workload: The tokens whose caches count against the limits; None counts no caches.
        limits: The memory of the stages; None does not limit it.
        mirrors: Whether stages may mirror caches of earlier ones, so that more cuts are legal.
        tensor: How many ranks share each stage, and what of it they share out.
        apart: Whether each rank is a worker of its own, with its own memory; then bytes and
            limits are those of one rank.
        wording: How the operator asks for what would help.

    Raises:
        CheckpointError: config.json and the weight files contradict each other.
        PartitionError: The ranges do not tile the layers, cut an adjacency group, disagree
            with ``size``, or there are more stages than layers.
        UsageError: The limits are not as many as the stages, or cannot be; or the options of
            ``tensor`` contradict each other or the model.
        UnsupportedError: The family does not say what its caches are, or how it is split.
        TensorParallelError: So many ranks cannot share the model.
        MemoryBudgetError: The stages do not fit their memory.
    """
    check_consistency(checkpoint, family)
    whole = profile_checkpoint(checkpoint, family, dtype, dequantize=dequantize)
    if mirrors:
        whole = whole.with_mirrors()

    def shared(tensor: TensorParallel) -> tuple[ModelProfile, RankPlan | None]:
        """What one worker holds if so many ranks share each stage, and how they do."""
        profile, ranks = whole, None
        if tensor.size > 1:
            ranks = plan_ranks(
                checkpoint, family, tensor, dequantize=dequantize, mirrors=mirrors, apart=apart
            )
            profile = profile_ranks(whole, checkpoint, family, dtype, ranks, dequantize=dequantize)
        if workload is not None:
            itemsize = activation_bytes(checkpoint, dtype)
            held = 1 if apart else tensor.size
            caches = [worker_kind(k, held, tensor.size) for k in family.caches(checkpoint.config)]
            profile = profile.with_caches(workload.kv_bytes(caches, itemsize))
        return profile, ranks

    def enough_ranks(budgets: Budgets) -> int | None:
        """The least number of ranks, above what was asked for, with which stages fit."""
        one = attrs.evolve(tensor, size=1)
        with suppress(UnsupportedError, UsageError, TensorParallelError):
            plan = plan_ranks(checkpoint, family, one, dequantize=dequantize, mirrors=mirrors)
            sizes = [n for n in plan.shards.legal_sizes(MOST_RANKS) if n > tensor.size]
            for size in sizes[:MOST_TRIED]:
                profile, _ = shared(attrs.evolve(tensor, size=size))
                if _fits(profile, given, budgets):
                    return size
        return None

    profile, ranks = shared(tensor)
    given = None if layers is None else _given(layers, size)
    stages = len(given) if given else 1 if size is None else size
    budgets = None if limits is None else limits.budgets(stages)
    try:
        ranges = given or _placed(profile, plugins, stages, by, budgets)
        validate_partition(ranges, profile, budgets)
    except MemoryBudgetError as error:
        assert budgets is not None
        quantized = is_quantized(checkpoint) and not dequantize
        more = enough_ranks(budgets) if apart else None  # those of one process share its memory
        helps = "; or ".join(
            remedies(profile, budgets, quantized=quantized, ranks=more, wording=wording)
        )
        raise attrs.evolve(error, way_out=f"What would help: {helps}." * bool(helps)) from None
    return Plan(profile, assign(profile, ranges), ranks)


def _fits(profile: ModelProfile, given: Sequence[range] | None, budgets: Budgets) -> bool:
    """Whether the ranges that were given fit, or where none were, any."""
    if given is None:
        return fits(profile, budgets)
    return overrun(assign(profile, given), budgets) is None


def _placed(
    profile: ModelProfile, plugins: Plugins, stages: int, by: BalanceBy, budgets: Budgets | None
) -> tuple[range, ...]:
    """What a plugin decides, else the balancer."""
    placed = plugins.hook.mlxcel_place_stages(
        profile=profile, stages=stages, balance=by, budgets=budgets
    )
    if placed is None:
        return balance(profile, stages, by, budgets)
    if len(placed) != stages:
        raise PartitionError(
            f"A plugin placed {len(placed)} stages where {stages} were asked for.",
            "Leave that plugin out (--no-plugin NAME), or give --pp-layers.",
        )
    return tuple(placed)


def _given(layers: str, size: int | None) -> tuple[range, ...]:
    """The ranges of ``--pp-layers``, as many as ``--pp-size`` says."""
    ranges = parse_ranges(layers)
    if size is not None and size != len(ranges):
        raise PartitionError(
            f"--pp-size {size} disagrees with the {len(ranges)} ranges of --pp-layers {layers}.",
            "Leave --pp-size out, or give one range per stage.",
        )
    return ranges
