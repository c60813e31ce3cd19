"""The automatic partition: contiguous layer ranges with the smallest possible heaviest stage.

This is the linear partition problem (Skiena, *The Algorithm Design Manual*, 8.5). The load of
the embedding belongs to the first layer and that of the head to the last one, since these
stay together wherever the cuts fall; only the legal cuts of the adjacency groups are tried.

Among the partitions whose heaviest stage is as light as possible, the one whose lightest
stage is as heavy as possible is taken; among those, the one whose last stage is shortest,
then the one before it, and so on. So the result is unique, and 10 equal layers on 3 stages
are 4, 3 and 3.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mlxcel.errors import PartitionError
from mlxcel.partition.profile import ModelProfile
from mlxcel.partition.ranges import format_ranges, legal_cuts

BalanceBy = Literal["bytes", "time"]
"""What is evened out: the memory of the stages, or the time they need for a token."""


def balance(profile: ModelProfile, stages: int, by: BalanceBy = "bytes") -> tuple[range, ...]:
    """Divide the layers of ``profile`` into ``stages`` half-open ranges, none empty.

    Raises:
        PartitionError: There is no such division: no stage, more stages than layers, or more
            than the adjacency groups leave pieces for.
    """
    num_layers = len(profile.layers)
    bounds = [0, *legal_cuts(num_layers, profile.groups), num_layers]
    _check(profile, stages, pieces=len(bounds) - 1)

    sums = np.concatenate(([0], np.cumsum(layer_loads(profile, by), dtype=np.int64)))[bounds]
    total = int(sums[-1])
    heaviest = bisect_left(
        range(total), True, key=lambda high: _reachable(sums, stages, 0, high) is not None
    )
    lightest = heaviest - bisect_left(
        range(heaviest),
        True,
        key=lambda slack: _reachable(sums, stages, heaviest - slack, heaviest) is not None,
    )
    reachable = _reachable(sums, stages, lightest, heaviest)
    assert reachable is not None

    ends = [len(bounds) - 1]
    for reached in reversed(reachable):
        load = sums[ends[-1]] - sums[: ends[-1]]
        fits = reached[: ends[-1]] & (load >= lightest) & (load <= heaviest)
        ends.append(int(np.flatnonzero(fits)[-1]))
    cuts = [bounds[end] for end in reversed(ends)]
    return tuple(range(a, b) for a, b in pairwise(cuts))


def layer_loads(profile: ModelProfile, by: BalanceBy) -> list[int]:
    """The load of each layer, with the embedding's on the first and the head's on the last."""
    if by == "bytes":
        loads = [layer.bytes for layer in profile.layers]
        first, last = profile.embedding_bytes, profile.head_bytes
    else:
        loads = [layer.work for layer in profile.layers]
        first, last = profile.embedding_work, profile.head_work
    loads[0] += first
    loads[-1] += last
    return loads


def _reachable(
    sums: NDArray[np.int64], stages: int, low: int, high: int
) -> list[NDArray[np.bool_]] | None:
    """Which bounds each stage can begin at, if every stage before it loads ``low`` to ``high``.

    ``sums[i]`` is the load of all pieces before bound ``i``. The answer has one mask over the
    bounds per stage, or is None where the last stage cannot end at the last bound.
    """
    index = np.arange(len(sums))
    first = np.searchsorted(sums, sums - high, side="left")
    stop = np.minimum(np.searchsorted(sums, sums - low, side="right"), index)
    window = stop > first
    reached = index == 0
    masks = []
    for _ in range(stages):
        masks.append(reached)
        before = np.concatenate(([0], np.cumsum(reached)))
        reached = window & (before[np.maximum(stop, first)] > before[first])
    return masks if reached[-1] else None


def _check(profile: ModelProfile, stages: int, pieces: int) -> None:
    num_layers = len(profile.layers)
    if stages < 1:
        raise PartitionError(f"A model cannot run on {stages} stages.", "Ask for 1 or more.")
    if stages > num_layers:
        raise PartitionError(
            f"{stages} stages are more than the {num_layers} layers of the model.",
            f"Ask for at most {pieces} stages (--pp-size).",
        )
    if stages > pieces:
        widest = max(profile.groups, key=lambda group: group.end - group.start)
        raise PartitionError(
            f"{stages} stages are more than the {pieces} pieces that this model can be cut into: "
            f"layers {format_ranges([range(widest.start, widest.end)])} must share a stage "
            f"({widest.reason}).",
            f"Ask for at most {pieces} stages (--pp-size).",
        )
