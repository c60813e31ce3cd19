"""From a text, however it is cut, to content, thoughts and calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.engine.thinking import Thinking
from mlxcel.server.parts import Content, Part, Reasoning, ToolCall
from mlxcel.server.readers import ForcedCallReader, MarkedReader, PlainReader, Reader

THINK = Thinking("<think>", "</think>", noise=("<|go|>",))


def read_call(text: str) -> list[ToolCall] | None:
    """Every comma-separated word of small letters is a call."""
    names = text.strip().split(",")
    good = all(name.isalpha() and name.islower() for name in names)
    return [ToolCall("id", name, "{}") for name in names] if good else None


CALL = ("<call>", "</call>", read_call)


def parts_of(reader: Reader, pieces: list[str], complete: bool = True) -> list[tuple[str, str]]:
    """The kinds and texts of all parts, neighbours of one kind joined."""
    parts: list[Part] = [part for piece in pieces for part in reader.feed(piece)]
    parts += reader.finish(complete)
    found: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case ToolCall(name=name):
                found.append(("call", name))
            case Content(text) | Reasoning(text):
                assert text
                kind = "say" if isinstance(part, Content) else "think"
                if found and found[-1][0] == kind:
                    text = found.pop()[1] + text
                found.append((kind, text))
    return found


CASES = [
    ("no marks <at> all", [("say", "no marks <at> all")]),
    ("", []),
    ("<think>\nhm, so\n</think>\n\nyes", [("think", "hm, so\n"), ("say", "yes")]),
    ("a<think>b</think>c", [("say", "a"), ("think", "b"), ("say", "c")]),
    ("<think>never ended", [("think", "never ended")]),
    ("<think></think>x", [("say", "x")]),
    ("</think> is content outside", [("say", "</think> is content outside")]),
    ("<think>a <think> b</think>c", [("think", "a <think> b"), ("say", "c")]),
    ("half a mark <thin", [("say", "half a mark <thin")]),
    ("<think>half </thin", [("think", "half </thin")]),
    ("<|go|>x<|go|> y", [("say", "xy")]),
    ("I look. <call>f</call>", [("say", "I look. "), ("call", "f")]),
    ("<call>f</call>\n<call>g</call>\n", [("call", "f"), ("call", "g")]),
    ("<call>f,g</call>done", [("call", "f"), ("call", "g"), ("say", "done")]),
    ("<call>NOT A CALL</call> x", [("say", "<call>NOT A CALL</call>x")]),
    ("<call>f", [("call", "f")]),
    ("<call>NOT", [("say", "<call>NOT")]),
    ("<think>a<call>f</call>b", [("think", "a"), ("call", "f"), ("say", "b")]),
]


@pytest.mark.parametrize(("text", "parts"), CASES)
def test_marks_divide_a_text(text: str, parts: list[tuple[str, str]]) -> None:
    """Between marks are thoughts and calls, outside is content; what is no call is content."""
    assert parts_of(MarkedReader(THINK, CALL), [text]) == parts


@given(st.sampled_from(CASES), st.lists(st.integers(1, 5), max_size=60))
def test_cuts_change_nothing(case: tuple[str, list[tuple[str, str]]], lengths: list[int]) -> None:
    """Wherever a text is cut into pieces, its parts are the same."""
    text, parts = case
    pieces = []
    for length in lengths:
        pieces.append(text[:length])
        text = text[length:]
    assert parts_of(MarkedReader(THINK, CALL), [*pieces, text]) == parts


def test_a_text_may_begin_inside_thoughts() -> None:
    """Where the prompt opened the thoughts, the text goes on with them."""
    reader = MarkedReader(THINK, inside=True)
    assert parts_of(reader, ["\nhm", "</th", "ink>", "\n", "ok"]) == [
        ("think", "hm"),
        ("say", "ok"),
    ]
    assert parts_of(MarkedReader(THINK, inside=True), ["cut"], False) == [("think", "cut")]


@pytest.mark.parametrize("end", ["</call>", ""])
def test_a_call_that_was_cut_short(end: str) -> None:
    """A call without its end mark is none if the text was cut, unless calls have no end mark."""
    reader = MarkedReader(None, ("<call>", end, read_call))
    found = parts_of(reader, ["x<call>f"], complete=False)
    assert found == ([("say", "x<call>f")] if end else [("say", "x"), ("call", "f")])


def test_text_comes_as_soon_as_it_can() -> None:
    """Only what may be the beginning of a mark is held back."""
    reader = MarkedReader(THINK, CALL)
    assert reader.feed("hello <") == [Content("hello ")]
    assert reader.feed("b") == [Content("<b")]
    assert reader.feed("<think>a") == [Reasoning("a")]
    assert reader.feed("<b") == [Reasoning("<b")]


def test_plain_text_passes() -> None:
    """Without marks everything is content at once."""
    assert parts_of(PlainReader(), ["<think>", "", "a"]) == [("say", "<think>a")]


@pytest.mark.parametrize(
    ("text", "parts"),
    [("f", [("call", "f")]), ("NOT", [("say", "NOT")]), ("", [])],
)
def test_a_forced_call_is_the_whole_text(text: str, parts: list[tuple[str, str]]) -> None:
    """It comes at the end, and what is no call is not lost."""
    make: Callable[[], Reader] = lambda: ForcedCallReader(read_call)  # noqa: E731
    assert parts_of(make(), list(text)) == parts
    assert make().feed(text) == []
