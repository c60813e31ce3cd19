"""The bench of collectives: real processes, few rounds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxcel.bench import collectives
from mlxcel.bench.collectives import RING, Report, Row, Settings, markdown
from mlxcel.bench.in_turn import Amount, Ratio
from mlxcel.bench.pairs import Spread
from mlxcel.cli.main import run


@pytest.mark.slow
def test_all_subjects_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our ring with and without encryption and MLX's, at each size."""
    monkeypatch.setattr(collectives, "AMOUNT", Amount(0, 3))
    flags = ["--pairs", "1", "--sizes", "4KiB,1MiB", "--ranks", "3", "--json"]
    assert run(["bench", "collectives", *flags]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {row["subject"] for row in report["rows"]} == {"tcp", "tcp, not encrypted", RING}
    assert len(report["rows"]) == 6 and len(report["ratios"]) == 4
    assert all(row["median"]["median"] > 0 for row in report["rows"])


def test_ratios_compare_what_ran_side_by_side() -> None:
    """Times against those of the same pair, with the bound where there is one."""
    sizes = (4 << 10, 64 << 10, 1 << 20)
    medians = {
        (size, name): times
        for size in sizes
        for name, times in {
            "one": [2.0, 4.0],
            "one, not encrypted": [1.0, 1.0],
            RING: [4.0, 2.0],
        }.items()
    }
    ratios = list(collectives._ratios(Settings("one", sizes), medians))
    assert ratios[:2] == [
        Ratio(4 << 10, f"one / {RING}, time", Spread(1.25, 0.5, 2.0), ""),
        Ratio(4 << 10, "one / one, not encrypted, time", Spread(3.0, 2.0, 4.0), ""),
    ]
    assert [ratio.bound for ratio in ratios[::2]] == ["", "≤ 2", "≤ 1.2"]


def test_the_tables() -> None:
    """Medians of the measurements, their range, and how they compare."""
    row = Row(1 << 20, "one", Spread(0.002, 0.001, 0.003), 0.004)
    ratio = Ratio(1 << 20, "one / two, time", Spread(1.1, 1.0, 1.3), "≤ 1.2")
    lines = markdown(Report((row,), (ratio,))).splitlines()
    assert lines[2] == "| 1 MiB | one | 2,000 µs | 1,000-3,000 | 4,000 µs |"
    assert lines[-1] == "| 1 MiB | one / two, time | 1.10 | 1.00-1.30 | ≤ 1.2 |"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--transport", "pigeon"], "--transport pigeon: there is no such transport. Installed:"),
        (["--sizes", "6"], "--sizes 6"),
        (["--ranks", "1"], "--ranks 1"),
        (["--pairs", "0"], "--pairs 0"),
        (["--spin", "-1"], "--spin -1"),
    ],
)
def test_flags_that_make_no_sense(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by name before anything starts."""
    assert run(["bench", "collectives", *flags]) == 2
    assert words in capsys.readouterr().err
