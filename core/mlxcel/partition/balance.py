"""The automatic partition: contiguous layer ranges with the smallest possible heaviest stage.

The load of the embedding belongs to the first layer and that of the head to the last one,
since these stay together wherever the cuts fall; only the legal cuts of the adjacency groups
are tried. What is evened out and what the budgets limit are two things: weights and caches
count against a budget, and the load is the bytes of the weights alone, or work.
:mod:`mlxcel.partition.solve` says which of several best partitions is taken; 10 equal layers
on 3 stages are 4, 3 and 3.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from mlxcel.errors import PartitionError
from mlxcel.errors.words import counted
from mlxcel.partition.assignment import assign
from mlxcel.partition.memory import Budgets, overrun
from mlxcel.partition.profile import ModelProfile
from mlxcel.partition.ranges import format_ranges, legal_cuts
from mlxcel.partition.solve import Totals, shortfall, solve

BalanceBy = Literal["bytes", "time", "time:prefill"]
"""What is evened out: the memory of the stages, the time they need for a decoded token, or
for a token of a prompt, which makes no logits."""

BALANCES: tuple[BalanceBy, ...] = get_args(BalanceBy)


def balance(
    profile: ModelProfile, stages: int, by: BalanceBy = "bytes", budgets: Budgets | None = None
) -> tuple[range, ...]:
    """Divide the layers of ``profile`` into ``stages`` half-open ranges, none empty.

    Args:
        by: What the stages get equal shares of, as far as the budgets allow.
        budgets: The bytes of weights and caches that each stage may hold.

    Raises:
        PartitionError: There is no such division: no stage, more stages than layers, or more
            than the adjacency groups leave pieces for.
        MemoryBudgetError: There are such divisions, but every one of them breaks a budget.
            The error is about the one whose worst stage lacks the least.
    """
    num_layers = len(profile.layers)
    bounds = [0, *legal_cuts(num_layers, profile.groups), num_layers]
    _check(profile, stages, pieces=len(bounds) - 1)
    loads = _totals(layer_loads(profile, by), bounds)
    memory = _totals(layer_memory(profile, stages), bounds)
    unlimited = int(memory[-1])
    mirrors = sum(profile.layers[layer].kv_bytes for layer in {g.start for g in profile.mirrors})
    limits = [  # as if every later stage mirrored all there is
        unlimited if budget is None else budget - (mirrors if stage else 0)
        for stage, budget in zip(range(stages), budgets or [None] * stages, strict=True)
    ]
    if places := solve(loads, memory, limits):
        return _ranges(places, bounds)
    assert budgets is not None
    more = shortfall(memory, limits)
    closest = solve(memory, memory, [limit + more for limit in limits])
    assert closest is not None
    ranges = _ranges(closest, bounds)
    error = overrun(assign(profile, ranges), budgets, best=True)
    if error is None:  # not all mirrors are needed
        return ranges
    raise error


def layer_loads(profile: ModelProfile, by: BalanceBy) -> list[int]:
    """The load of each layer, with the embedding's on the first and the head's on the last."""
    if by == "bytes":
        loads = [layer.bytes for layer in profile.layers]
        first, last = profile.embedding_bytes, profile.head_bytes
    else:
        loads = [layer.work for layer in profile.layers]
        first, last = profile.embedding_work, profile.head_work
    loads[0] += first
    if by != "time:prefill":
        loads[-1] += last
    return loads


def layer_memory(profile: ModelProfile, stages: int) -> list[int]:
    """What each layer takes of a budget, with the embedding on the first, the head on the last."""
    memory = [layer.bytes + layer.kv_bytes for layer in profile.layers]
    memory[0] += profile.embedding_bytes
    memory[-1] += profile.head_bytes
    if stages == 1:
        memory[-1] -= profile.shared_bytes
    return memory


def _totals(values: list[int], bounds: list[int]) -> Totals:
    return np.concatenate(([0], np.cumsum(values, dtype=np.int64)))[bounds]


def _ranges(places: tuple[int, ...], bounds: list[int]) -> tuple[range, ...]:
    return tuple(range(bounds[a], bounds[b]) for a, b in pairwise(places))


def _check(profile: ModelProfile, stages: int, pieces: int) -> None:
    num_layers = len(profile.layers)
    if stages < 1:
        raise PartitionError(f"A model cannot run on {stages} stages.", "Ask for 1 or more.")
    if stages > num_layers:
        raise PartitionError(
            f"{stages} stages are more than the {counted(num_layers, 'layer')} of the model.",
            f"Ask for at most {counted(pieces, 'stage')} (--pp-size).",
        )
    if stages > pieces:
        widest = max(profile.groups, key=lambda group: group.end - group.start)
        raise PartitionError(
            f"{stages} stages are more than the {counted(pieces, 'piece')} that this model can be "
            f"cut into: "
            f"layers {format_ranges([range(widest.start, widest.end)])} must share a stage "
            f"({widest.reason}).",
            f"Ask for at most {counted(pieces, 'stage')} (--pp-size).",
        )
