"""How results are printed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.cli.output import InOrder, JsonOutput, TextOutput
from mlxcel.engine.pipeline_report import PipelineReport, StageReport
from mlxcel.engine.results import Result

REPORT = PipelineReport((StageReport(0, "0-2", 10, 0.75, 0.25),), 0.5)


def result(index: int, text: str = "") -> Result:
    return Result(index, text, (1, 2), "stop", 3, 2, 30.0, 20.0)


def test_later_prompts_wait_for_earlier_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt's text streams once those before it are finished."""
    output = TextOutput(3)
    output.text(1, "B1")
    output.text(0, "A1 ")
    assert capsys.readouterr().out == "==> prompt 0 <==\nA1 "
    output.result(result(1))
    output.text(0, "A2")
    assert capsys.readouterr().out == "A2"
    output.text(2, "C1 ")
    output.result(result(0))
    assert capsys.readouterr().out == "\n==> prompt 1 <==\nB1\n==> prompt 2 <==\nC1 "
    output.text(2, "C2")
    output.result(result(2))
    output.end([result(i) for i in range(3)], REPORT)
    assert capsys.readouterr().out == (
        "C2\nprompt: 9 tokens, 90.0 tok/s; generation: 6 tokens, 60.0 tok/s; "
        "bubble: 25.0% measured, 50.0% expected\n"
    )


def test_one_prompt_has_no_heading(capsys: pytest.CaptureFixture[str]) -> None:
    """A single text streams as it is."""
    output = TextOutput(1)
    output.text(0, "A")
    output.result(result(0))
    assert capsys.readouterr().out == "A\n"


@given(st.lists(st.integers(0, 3), max_size=30), st.permutations(range(4)))
def test_every_text_comes_once_and_in_order(events: list[int], ends: list[int]) -> None:
    """Whatever comes when, texts appear whole and one prompt after the other."""
    order = InOrder()
    expected = dict.fromkeys(range(4), "")
    shown = ""
    for number, index in enumerate(events):
        expected[index] += f"{index}.{number} "
        shown += order.text(index, f"{index}.{number} ")
    for index in ends:
        shown += "".join(order.finish(index))
    assert shown == "".join(expected.values())


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """One object a line, in the order of the prompts; what is no ASCII stays readable."""
    output = JsonOutput()
    output.text(0, "ignored")
    output.result(result(1))
    output.end([result(0, "é\n"), result(1)], REPORT)
    out = capsys.readouterr().out
    first, second, stages = out.splitlines()
    assert "é\\n" in first
    assert [json.loads(line)["index"] for line in (first, second)] == [0, 1]
    assert json.loads(stages) == {
        "stages": [{"stage": 0, "layers": "0-2", "bytes": 10, "busy": 0.75, "bubble": 0.25}],
        "expected_bubble": 0.5,
    }
