"""Several subjects measured in turn at each size, and how they compare.

Ratios are of measurements that ran next to each other, so that they compare what ran under the
same conditions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np

from mlxcel.bench.pairs import Spread
from mlxcel.bench.subject import Subject

Times = Mapping[tuple[int, str], Sequence[Sequence[float]]]
"""By size and subject: the seconds of each round of each measurement."""

LEAST_ROUNDS = 20


@attrs.frozen
class Amount:
    """How many rounds a measurement has: as many as move ``size`` bytes, 20 to ``most``."""

    size: int
    most: int

    def rounds(self, size: int) -> int:
        """The rounds with ``size`` bytes each."""
        return min(self.most, max(LEAST_ROUNDS, self.size // size))


@attrs.frozen
class Ratio:
    """How one subject compares with another at one size; ``bound`` as text, or empty."""

    size: int
    what: str
    spread: Spread
    bound: str


def measure(
    subjects: Sequence[Subject], sizes: Sequence[int], repeats: int, amount: Amount
) -> Times:
    """Measure all ``subjects`` at one size in turn, ``repeats`` times, then at the next size."""
    times: dict[tuple[int, str], list[list[float]]] = {}
    for size in sizes:
        for _ in range(repeats):
            for subject in subjects:
                readings = subject.measure(size, amount.rounds(size))
                times.setdefault((size, subject.name), []).append(readings)
        print(f"{format_size(size)} done", file=sys.stderr)
    return times


def medians(times: Times) -> dict[tuple[int, str], list[float]]:
    """The median of each measurement."""
    return {key: [float(np.median(run)) for run in runs] for key, runs in times.items()}


def quotient(over: Sequence[float], under: Sequence[float]) -> Spread:
    """The spread of the quotients of measurements that ran next to each other."""
    return Spread.of(a / b for a, b in zip(over, under, strict=True))


def ratio_table(what: str, ratios: Iterable[Ratio]) -> list[str]:
    """The lines of a table in Markdown; ``what`` has the sizes."""
    lines = [f"| {what} | ratio | median | range | bound |", "|---|---|---|---|---|"]
    for ratio in ratios:
        spread = ratio.spread
        lines.append(
            f"| {format_size(ratio.size)} | {ratio.what} | {spread.median:.2f} "
            f"| {spread.low:.2f}-{spread.high:.2f} | {ratio.bound} |"
        )
    return lines


def format_size(size: int) -> str:
    """``size`` bytes in binary units where it is a whole number of them."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def clear(transport: str) -> str:
    """What the subject of ``transport`` is called whose frames are not encrypted."""
    return f"{transport}, not encrypted"
