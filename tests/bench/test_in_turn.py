"""Measuring in turn: every subject at every size, and ratios of neighbours."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcel.bench.in_turn import (
    Amount,
    Ratio,
    format_size,
    measure,
    medians,
    quotient,
    ratio_table,
)
from mlxcel.bench.pairs import Spread


class Subject:
    def __init__(self, name: str, log: list[tuple[str, int, int]]) -> None:
        self.name = name
        self._log = log

    def measure(self, size: int, rounds: int) -> list[float]:
        self._log.append((self.name, size, rounds))
        return [float(len(self._log)), 100.0, 0.0]


def test_subjects_take_turns_at_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    """A B A B at one size, then at the next, with as many rounds as its bytes allow."""
    log: list[tuple[str, int, int]] = []
    subjects: list[Any] = [Subject("a", log), Subject("b", log)]
    times = measure(subjects, [1024, 4096], 2, Amount(100 * 1024, 60))
    assert log == [(name, 1024, 60) for name in "abab"] + [(name, 4096, 25) for name in "abab"]
    assert medians(times)[1024, "b"] == [2.0, 4.0]
    assert "4 KiB done" in capsys.readouterr().err


def test_a_measurement_has_at_least_twenty_rounds() -> None:
    """However large they are."""
    assert Amount(1 << 20, 500).rounds(1 << 30) == 20


def test_quotients_are_of_neighbours() -> None:
    """Not of medians of all, which would mix what ran at different times."""
    assert quotient([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == Spread(3.0, 2.0, 4.0)


def test_the_table_of_ratios() -> None:
    """Median, range and bound."""
    table = ratio_table("array", [Ratio(1 << 20, "a / b", Spread(1.1, 1.0, 1.3), "≤ 2")])
    assert table[0] == "| array | ratio | median | range | bound |"
    assert table[2] == "| 1 MiB | a / b | 1.10 | 1.00-1.30 | ≤ 2 |"


@pytest.mark.parametrize(
    ("size", "words"), [(3 << 20, "3 MiB"), (1536, "1536 B"), (2 << 10, "2 KiB")]
)
def test_sizes_are_in_whole_units(size: int, words: str) -> None:
    """Or in bytes."""
    assert format_size(size) == words
