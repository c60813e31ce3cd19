"""Stop strings: cut exactly, wherever the pieces of text begin and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.engine.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """The text that is shown, and whether a stop string ended it."""
    matcher = StopStrings(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    return shown + matcher.finish(), matcher.stopped


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["own fox"], ["the br", "own ", "fo", "x jumps"], "the br"),
        (["beta gamma"], ["alpha be", "ta", " gam", "ma delta"], "alpha "),
        (["ab", "abcd"], ["xab", "cd"], "x"),
        (["abcd", "bc"], ["xab", "cd"], "xa"),
        (["bcd", "cd"], ["xab", "cd"], "xa"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb"),
        (["aab"], ["aa", "a", "b"], "a"),
    ],
)
def test_what_is_shown_ends_before_the_stop(
    stops: list[str], pieces: list[str], shown: str
) -> None:
    """The text ends right before the first stop string, over the borders of pieces."""
    assert run(stops, pieces) == (shown, True)


def test_held_text_is_flushed() -> None:
    """What only looked like the beginning of a stop string comes at the end."""
    matcher = StopStrings(["stop here"])
    assert matcher.feed("do not stop") == "do not "
    assert matcher.feed(" he") == ""
    assert matcher.finish() == "stop he"
    assert not matcher.stopped


def test_nothing_passes_after_the_stop() -> None:
    """After a stop string there is no more text."""
    matcher = StopStrings(["x"])
    assert matcher.feed("axb") == "a"
    assert matcher.feed("c") == ""
    assert matcher.finish() == ""


def test_empty_stop_strings_are_no_stop_strings() -> None:
    """An empty string would stop everything before it began."""
    assert run([""], ["ab"]) == ("ab", False)


_TEXT = st.text(alphabet="ab ", max_size=30)


@given(st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), max_size=3), st.lists(_TEXT))
def test_pieces_do_not_matter(stops: list[str], pieces: list[str]) -> None:
    """However a text is cut, what is shown is the same, and never contains a stop string."""
    text = "".join(pieces)
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    assert run(stops, pieces) == expected
    assert run(stops, list(text)) == expected


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3), _TEXT)
def test_no_part_of_a_stop_string_leaks(stops: list[str], text: str) -> None:
    """What has been shown after each character never needs to be taken back."""
    matcher, shown = StopStrings(stops), ""
    for at, character in enumerate(text):
        shown += matcher.feed(character)
        final, _ = run(stops, [text])
        assert final.startswith(shown), (at, shown)
