"""How thoughts are told from answers, by a model's vocabulary or its template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel.checkpoint.config import read_config
from mlxcel.engine.thinking import STRUCTURE, Thinking, find_thinking
from mlxcel.engine.tokenizer import load_tokenizer

CHANNELS = Thinking("<|channel>thought", "<channel|>")


@pytest.mark.parametrize(
    ("tokens", "template", "start", "end"),
    [
        (["<think>", "</think>"], "", "<think>", "</think>"),
        (["<think>"], "", None, None),
        (["<longcat_think>", "</longcat_think>"], "", "<longcat_think>", "</longcat_think>"),
        (["<|channel>", "<channel|>"], "", CHANNELS.start, CHANNELS.end),
        (["<|open|>", "<|close|>", "<|sep|>"], "", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        (
            ["<|channel|>", "<|message|>", "<|end|>"],
            "",
            "<|channel|>analysis<|message|>",
            "<|end|>",
        ),
        ([], "{{ content.split('</think>')[-1] }}<think>", "<think>", "</think>"),
        ([], "nothing of the kind", None, None),
    ],
)
def test_marks_are_found(
    tokens: list[str], template: str, start: str | None, end: str | None
) -> None:
    """A pair of tokens tells, or else the template."""
    found = find_thinking(tokens.__contains__, template)
    assert (found.start if found else None, found.end if found else None) == (start, end)


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [("hi<think>\n", True), ("hi<think>", True), ("<think>x", False), ("<think></think>\n", False)],
)
def test_a_prompt_may_open_the_thoughts(prompt: str, opened: bool) -> None:
    """Only what stands at its end counts, not what a user wrote."""
    assert Thinking("<think>", "</think>").opened_by(prompt) is opened


def test_thoughts_can_be_skipped() -> None:
    """What the prompt opened is closed, and the answer's own mark is set."""
    assert Thinking("<a>", "</a>").skipped("hi<a>\n") == "hi<a>\n</a>\n\n"
    assert Thinking("<a>", "</a>").skipped("hi") == "hi"
    assert Thinking("<a>", "</a>", "<b>").skipped("hi") == "hi<b>"


def test_structure_is_text(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Marks of thoughts and calls are shown even where the tokenizer calls them special."""
    source = tiny("llama")
    for file in source.iterdir():
        if file.suffix == ".json":
            text = file.read_text(encoding="utf-8")
            for number, mark in enumerate(["<think>", "</think>"]):
                text = text.replace(f"<|extra{number}|>", mark)
            (tmp_path / file.name).write_text(text, encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path, read_config(tmp_path))
    assert tokenizer.thinking == Thinking("<think>", "</think>")
    ids = tokenizer.encode("<|user|><think>a</think>b")
    assert max(ids) >= 256
    assert tokenizer.decode(ids) == "<think>a</think>b"
    added = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    special = {token["content"] for token in added if token["special"]}
    assert {"<think>", "</think>"} <= special & STRUCTURE
