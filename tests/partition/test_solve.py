"""The solver on bare numbers; test_balance.py holds it against independent searches."""

from __future__ import annotations

import numpy as np
import pytest

from mlxcel.partition.solve import Totals, shortfall, solve


def totals(*values: int) -> Totals:
    return np.concatenate(([0], np.cumsum(values, dtype=np.int64)))


FIVES = totals(5, 5, 5, 5)


def test_loads_and_memory_are_two_things() -> None:
    """Loads are evened out, memory is only kept below its budgets."""
    memory = totals(1, 1, 9, 1)
    assert solve(FIVES, memory, [20, 20]) == (0, 2, 4)
    assert solve(FIVES, memory, [20, 9]) == (0, 3, 4)
    assert solve(FIVES, memory, [10, 9]) is None


def test_every_stage_has_a_piece() -> None:
    """Pieces without load or memory are divided too."""
    assert solve(totals(0, 0, 0), totals(0, 0, 0), [0, 0, 0]) == (0, 1, 2, 3)


def test_more_stages_than_pieces() -> None:
    """They cannot have a piece each."""
    assert solve(FIVES, FIVES, [20] * 5) is None


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [([10, 10], 0), ([9, 10], 1), ([0, 20], 5), ([0, 0], 10), ([-3, 2], 13), ([-30, -20], 35)],
)
def test_shortfall(budgets: list[int], expected: int) -> None:
    """What every budget must grow by; budgets may be less than nothing."""
    assert shortfall(FIVES, budgets) == expected
