"""Interleaved pairs: who runs when, and what is made of the readings."""

from __future__ import annotations

from mlxcel.bench.pairs import Spread, compare


def test_spread() -> None:
    """Median and extremes, whatever the order."""
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_the_two_take_turns() -> None:
    """One uncounted run of each, then A B A B; ratios are of neighbours."""
    order: list[str] = []
    speeds = iter([1.0, 1.0, 2.0, 4.0, 10.0, 30.0, 5.0, 5.0])

    def runs(name: str) -> float:
        order.append(name)
        return next(speeds)

    comparison = compare(lambda: runs("a"), lambda: runs("b"), 3)
    assert order == ["a", "b"] * 4
    assert comparison.ratio == Spread(2.0, 1.0, 3.0)
    assert comparison.reference == Spread(5.0, 2.0, 10.0)
    assert comparison.ours == Spread(5.0, 4.0, 30.0)
