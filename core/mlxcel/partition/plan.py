"""Which layers go where: a plan from a checkpoint's headers and what the user asked for."""

from __future__ import annotations

import attrs

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.errors import PartitionError
from mlxcel.family.contract import Family
from mlxcel.partition.assignment import StageAssignment, assign
from mlxcel.partition.balance import BalanceBy, balance
from mlxcel.partition.consistency import check_consistency
from mlxcel.partition.profile import ModelProfile, profile_checkpoint
from mlxcel.partition.ranges import parse_ranges, validate_ranges
from mlxcel.plugins import Plugins


@attrs.frozen
class Plan:
    """The stages of one model: its profile and one assignment per stage."""

    profile: ModelProfile
    stages: tuple[StageAssignment, ...]


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
) -> Plan:
    """Cut a model into stages; nothing is loaded.

    Args:
        dequantize: Whether packed matrices become plain float32 ones.
        size: The number of stages; None is 1, or what ``layers`` implies.
        layers: Inclusive ranges such as ``"0-19,20-39"``; None balances automatically.
        by: What the balancer evens out: ``bytes`` or ``time``.

    Raises:
        CheckpointError: config.json and the weight files contradict each other.
        PartitionError: The ranges do not tile the layers, cut an adjacency group, disagree
            with ``size``, or there are more stages than layers.
    """
    check_consistency(checkpoint, family)
    profile = profile_checkpoint(checkpoint, family, dtype, dequantize=dequantize)
    ranges = _ranges(profile, plugins, size, layers, by)
    validate_ranges(ranges, len(profile.layers), profile.groups)
    return Plan(profile, assign(profile, ranges))


def _ranges(
    profile: ModelProfile, plugins: Plugins, size: int | None, layers: str | None, by: BalanceBy
) -> tuple[range, ...]:
    if layers is None:
        stages = 1 if size is None else size
        placed = plugins.hook.mlxcel_place_stages(profile=profile, stages=stages, balance=by)
        if placed is None:
            return balance(profile, stages, by)
        if len(placed) != stages:
            raise PartitionError(
                f"A plugin placed {len(placed)} stages where {stages} were asked for.",
                "Leave that plugin out (--no-plugin NAME), or give --pp-layers.",
            )
        return tuple(placed)
    ranges = parse_ranges(layers)
    if size is not None and size != len(ranges):
        raise PartitionError(
            f"--pp-size {size} disagrees with the {len(ranges)} ranges of --pp-layers {layers}.",
            "Leave --pp-size out, or give one range per stage.",
        )
    return ranges
