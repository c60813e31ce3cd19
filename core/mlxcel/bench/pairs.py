"""Compare two things by running them in turn: A B A B …, and judge by the ratio of each pair.

A machine's speed drifts; two runs next to each other see the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import attrs


@attrs.frozen
class Spread:
    """Median and extremes of several readings."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, readings: Iterable[float]) -> Spread:
        values = sorted(readings)
        return cls(statistics.median(values), values[0], values[-1])


@attrs.frozen
class Comparison:
    """What ``ours`` reached against ``reference`` (tokens per second), and the pairs' ratios."""

    reference: Spread
    ours: Spread
    ratio: Spread


def compare(reference: Callable[[], float], ours: Callable[[], float], pairs: int) -> Comparison:
    """Run both ``pairs`` times in turn, after one uncounted run of each."""
    reference()
    ours()
    readings = [(reference(), ours()) for _ in range(pairs)]
    return Comparison(
        Spread.of(theirs for theirs, _ in readings),
        Spread.of(own for _, own in readings),
        Spread.of(own / theirs for theirs, own in readings),
    )
