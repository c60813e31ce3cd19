"""Blocks that add something up amid their work."""

from __future__ import annotations

from mlxcel.family.in_step import Steps, alone, in_step


def block(number: int) -> Steps:
    """Adds twice; numbers stand for arrays here."""
    first = yield number  # type: ignore[misc]
    second = yield first * number
    return first, second


def test_ranks_side_by_side() -> None:
    """Each is sent the sum of what all yield, as often as they do."""
    assert in_step([block(2), block(3)], sum) == [(5, 25), (5, 25)]  # type: ignore[arg-type]


def test_a_block_that_is_whole() -> None:
    """What it yields is the sum."""
    assert alone(block(3)) == (3, 9)


def test_a_block_that_adds_nothing_up() -> None:
    """It just returns."""

    def plain() -> Steps:
        return 7
        yield

    assert alone(plain()) == 7
