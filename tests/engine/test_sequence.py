"""What a token brings for a request: its text, and its log-probabilities."""

from __future__ import annotations

import pytest

from mlxcel.engine.sequence import Output, Sequence
from mlxcel.engine.slot import Request
from mlxcel.engine.stop_strings import StopStrings
from mlxcel.pipeline.step import Logprobs

ITEM = Logprobs(-0.5, (7,), (-0.5,))


def sequence(tokens: int = 4, *, ignore_end: bool = False) -> Sequence:
    request = Request(3, (1, 2), tokens, ignore_end=ignore_end)
    return Sequence(request, None, StopStrings(()))


@pytest.mark.parametrize("found", [None, ITEM])
def test_each_token_has_its_item(found: Logprobs | None) -> None:
    """Amid the text and at its end there are as many items as tokens, or none at all."""
    items = () if found is None else (found,)
    one = sequence(2)
    assert one.advance(7, False, found) == Output(3, "", (7,), logprobs=items)
    assert one.advance(8, False, found) == Output(3, "", (8,), "length", logprobs=items)


def test_an_end_token_has_none() -> None:
    """It is no part of the text, so neither are its log-probabilities."""
    assert sequence().advance(9, True, ITEM) == Output(3, "", (), "stop")


def test_an_end_token_that_is_ignored_has_one() -> None:
    """Where end tokens do not end the text, they are tokens of it."""
    ignoring = sequence(ignore_end=True)
    assert ignoring.advance(9, True, ITEM) == Output(3, "", (9,), logprobs=(ITEM,))
