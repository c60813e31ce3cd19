"""The loading bars."""

from __future__ import annotations

import pytest

from mlxcel.cli.progress import LoadingBars


def test_off_a_terminal_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """Where standard error is no terminal, bars leave no trace."""
    bars = LoadingBars()
    bars(0, 5, 10)
    bars.close()
    assert capsys.readouterr() == ("", "")


def test_a_bar_per_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal each stage has a bar, on standard error only."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    bars = LoadingBars()
    for done in (5, 10):
        bars(0, done, 10)
        bars(1, done, 20)
    bars.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading stage 0" in err
    assert "loading stage 1" in err
