"""The bench of transports: real processes, few rounds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxcel.bench import transport
from mlxcel.bench.in_turn import Amount, Ratio
from mlxcel.bench.pairs import Spread
from mlxcel.bench.transport import Report, Row, Settings, markdown
from mlxcel.cli.main import run


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "AMOUNT", Amount(0, 3))


@pytest.mark.slow
def test_all_subjects_are_measured(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The transport with and without encryption, raw sockets and MLX's ring, at each payload."""
    assert run(["bench", "transport", "--repeats", "1", "--sizes", "1KiB,1MiB", "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    subjects = {row["subject"] for row in report["rows"]}
    assert {"tcp", "tcp, not encrypted", "raw sockets", "ring"} <= subjects
    assert len(report["rows"]) == 2 * len(subjects)
    assert all(0 < row["p50"] <= row["p95"] <= row["p99"] for row in report["rows"])
    assert {ratio["size"] for ratio in report["ratios"]} == {1 << 10, 1 << 20}


def test_ratios_compare_what_ran_side_by_side() -> None:
    """Round trips at small payloads, bandwidths at large ones, each with its bound."""
    medians = {
        (size, name): times
        for size in (8 << 10, 1 << 20)
        for name, times in {
            "one": [2.0, 4.0],
            "one, not encrypted": [1.0, 1.0],
            "ring": [4.0, 2.0],
        }.items()
    }
    settings = Settings(("one",), (8 << 10, 1 << 20))
    assert list(transport._ratios(settings, medians)) == [
        Ratio(8 << 10, "one / ring, round trip", Spread(1.25, 0.5, 2.0), "≤ 1.0"),
        Ratio(1 << 20, "one / one, not encrypted, bandwidth", Spread(0.375, 0.25, 0.5), "≥ 0.8"),
        Ratio(1 << 20, "one / ring, bandwidth", Spread(1.25, 0.5, 2.0), "≥ 0.3"),
    ]


def test_the_tables() -> None:
    """Half a round trip is labelled so, and the bandwidth is that of one direction."""
    row = Row(1 << 20, "one", 0.002, 0.003, 0.004)
    ratio = Ratio(1 << 20, "one / ring, bandwidth", Spread(0.5, 0.4, 0.6), "≥ 0.3")
    lines = markdown(Report((row,), (ratio,))).splitlines()
    assert "one way (half)" in lines[0]
    assert lines[2] == (
        "| 1 MiB (prefill activation) | one | 2,000 µs | 3,000 µs | 4,000 µs | 1,000 µs "
        "| 1.049 GB/s |"
    )
    assert lines[-1] == "| 1 MiB | one / ring, bandwidth | 0.50 | 0.40-0.60 | ≥ 0.3 |"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--transport", "pigeon"], "--transport pigeon: there is no such transport. Installed:"),
        (["--sizes", "6"], "--sizes 6"),
        (["--sizes", "1KiB,x"], "--sizes 'x'"),
        (["--repeats", "0"], "--repeats 0"),
        (["--spin", "-1"], "--spin -1"),
    ],
)
def test_flags_that_make_no_sense(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by name before anything starts."""
    assert run(["bench", "transport", *flags]) == 2
    assert words in capsys.readouterr().err
