"""Cut a row of weighted pieces into stages so that the heaviest is as light as possible.

This is the linear partition problem (Skiena, *The Algorithm Design Manual*, 8.5), where every
stage also has a memory of its own that may not be exceeded. The answer is found by binary
search: for a limit on the load it is easy to tell whether a partition exists, by following
from stage to stage which places it can begin at. All running totals only rise, so the
starts from which a stage can reach an end are a window, and a step is a few array operations.

Among the partitions whose heaviest stage is as light as possible, the one whose lightest
stage is as heavy as possible is taken; among those, the one whose last stage is shortest,
then the one before it, and so on. So the answer is unique.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Totals = NDArray[np.int64]
"""Running totals: entry ``i`` is what all pieces before place ``i`` come to; entry 0 is 0."""

_Masks = list[NDArray[np.bool_]]


def solve(loads: Totals, memory: Totals, budgets: Sequence[int]) -> tuple[int, ...] | None:
    """The places where the stages begin and end, or None if nothing fits the budgets.

    Args:
        loads: What is evened out, as running totals over P pieces: P + 1 entries.
        memory: What the budgets limit, likewise.
        budgets: The memory of each stage, in the order of the stages, which have at least a
            piece each.

    Returns:
        One place more than there are stages: from 0 to P, rising.
    """
    windows = _windows(memory, budgets)
    total = int(loads[-1])
    if _reachable(loads, windows, 0, total) is None:
        return None
    heaviest = bisect_left(
        range(total), True, key=lambda high: _reachable(loads, windows, 0, high) is not None
    )
    lightest = heaviest - bisect_left(
        range(heaviest),
        True,
        key=lambda slack: _reachable(loads, windows, heaviest - slack, heaviest) is not None,
    )
    masks = _reachable(loads, windows, lightest, heaviest)
    assert masks is not None
    return tuple(reversed(list(_places(loads, windows, lightest, heaviest, masks))))


def shortfall(memory: Totals, budgets: Sequence[int]) -> int:
    """The least number of units by which every budget must grow for a partition to fit."""
    enough = int(memory[-1]) + max(0, -min(budgets))

    def fits(more: int) -> bool:
        windows = _windows(memory, [budget + more for budget in budgets])
        return _reachable(memory, windows, 0, int(memory[-1])) is not None

    return bisect_left(range(enough), True, key=fits)


def _windows(memory: Totals, budgets: Sequence[int]) -> list[NDArray[np.intp]]:
    """For each stage and each place it can end at, the first start that its budget allows."""
    return [np.searchsorted(memory, memory - budget, side="left") for budget in budgets]


def _reachable(
    loads: Totals, windows: Sequence[NDArray[np.intp]], low: int, high: int
) -> _Masks | None:
    """Which places each stage can begin at, if every stage before it loads ``low`` to ``high``.

    One mask over the places per stage; None where the last stage cannot end at the last place.
    """
    place = np.arange(len(loads))
    first = np.searchsorted(loads, loads - high, side="left")
    stop = np.minimum(np.searchsorted(loads, loads - low, side="right"), place)
    reached = place == 0
    masks = []
    for fits in windows:
        masks.append(reached)
        before = np.concatenate(([0], np.cumsum(reached)))
        start = np.maximum(first, fits)
        reached = before[np.maximum(stop, start)] > before[start]
    return masks if reached[-1] else None


def _places(
    loads: Totals, windows: Sequence[NDArray[np.intp]], low: int, high: int, masks: _Masks
) -> Iterator[int]:
    """From the last place back to 0: each stage begins as late as it can."""
    end = len(loads) - 1
    yield end
    for fits, reached in zip(reversed(windows), reversed(masks), strict=True):
        load = loads[end] - loads[:end]
        starts = reached[:end] & (load >= low) & (load <= high)
        starts[: fits[end]] = False
        end = int(np.flatnonzero(starts)[-1])
        yield end
