"""The benches run whole on a tiny checkpoint: real processes, real servers, small numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel.bench.pipeline import Settings, cases
from mlxcel.cli.main import run

Tiny = Callable[..., Path]


def test_bench_engine(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure of the engine's bench is there and positive."""
    assert run(["bench", "engine", "-m", str(tiny("llama")), "--repeats", "1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 5
    assert all(row["spread"]["median"] > 0 for row in rows)


@pytest.mark.slow
def test_bench_pipeline(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """A case against mlx-lm, one against its batches and one of peers give a table with bounds."""
    command = ["bench", "pipeline", "-m", str(tiny("llama")), "--pairs", "1", "--tokens", "6"]
    only = ["--only", "decode, 1 stage, 1", "--only", "stages, 4 sequences, against batch"]
    only += ["--only", "2 peers, 4 sequences"]
    assert run([*command, *only]) == 0
    table = capsys.readouterr().out
    assert "| ≥ 0.97 |" in table
    assert "| ≥ 1.5 |" in table
    assert "| ≥ 0.95 |" in table
    figures = r"\| \d+\.\d \| \d+\.\d \| \d+\.\d\d \| \d+\.\d\d-\d+\.\d\d \|"
    assert len(re.findall(figures, table)) >= 3


@pytest.mark.slow
def test_bench_tensor(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rank processes against one, decode and prefill with their bound, and the limit."""
    command = ["bench", "tensor", "-m", str(tiny("llama")), "--pairs", "1", "--tokens", "4"]
    assert run([*command, "--prompt", "16", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["bound"] for row in rows] == ["", "≥ 1.5", "≥ 1.5"]
    assert all(row["comparison"]["ratio"]["median"] > 0 for row in rows)


def test_every_case_has_a_name_of_its_own(tiny: Tiny) -> None:
    """Rows can be told apart, and --only can name each."""
    names = [case.name for case in cases(tiny("llama"), Settings())]
    assert len(set(names)) == len(names) >= 10


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["pipeline", "--pairs", "0"], "--pairs 0"),
        (["pipeline", "--tokens", "3"], "--tokens 3"),
        (["pipeline", "--only", "nothing"], "--only"),
        (["engine", "--repeats", "0"], "--repeats 0"),
        (["tensor", "--tp-size", "1"], "--tp-size 1"),
    ],
)
def test_values_that_measure_nothing(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], arguments: list[str], flag: str
) -> None:
    """Too few of anything is refused by name."""
    kind, *rest = arguments
    assert run(["bench", kind, "-m", str(tiny("llama")), *rest]) == 2
    assert flag in capsys.readouterr().err


@pytest.mark.slow
def test_bench_serve_against_mlx_lm(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """Both servers are started, answer the same requests with exact lengths, and are compared."""
    command = ["bench", "serve", "-m", str(tiny("llama")), "--against", "mlx-lm", "--pairs", "1"]
    load = ["--requests", "3", "--clients", "2", "--output-length", "4-6", "--json"]
    assert run([*command, *load, "--", "--pp-size", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    [[theirs, own]] = found["pairs"]
    for side in (theirs, own):
        assert (side["good"], side["errors"], side["short"], side["estimated"]) == (3, {}, 0, 0)
        assert side["prompt_tokens"] == 3 * 64
        assert side["cached_tokens"] < 3 * 8, "all but the first letters are new"
    assert theirs["output_tokens"] == own["output_tokens"]
    assert {row["name"] for row in found["rows"]} >= {"output", "time to first token, p95"}
    assert all(row["ratio"]["median"] > 0 for row in found["rows"])


def test_bench_serve_starts_a_server(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a URL the model is served with the given flags, and a table is printed."""
    command = ["bench", "serve", "-m", str(tiny("llama")), "--requests", "3", "--seed", "1"]
    assert run([*command, "--", "--pp-workers", "thread", "--alias", "some-name"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("some-name at http://127.0.0.1:")
    assert "| 3 | 0 |" in out
    assert "| 192 | 0 | 48 |" in out


def test_bench_serve_with_a_server_that_cannot_start(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last words are told, exit 1."""
    command = ["bench", "serve", "-m", str(tiny("llama")), "--", "--pp-size", "99"]
    assert run(command) == 1
    assert "99 stages are more than the 6 layers" in capsys.readouterr().err
