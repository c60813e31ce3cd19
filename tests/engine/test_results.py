"""From tokens to texts and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxcel.checkpoint.config import read_config
from mlxcel.engine.generation import Progress, Token
from mlxcel.engine.results import Result, collect
from mlxcel.engine.slot import Request
from mlxcel.engine.tokenizer import Tokenizer, load_tokenizer

REQUESTS = [Request(0, tuple(b"prompt"), 9), Request(1, tuple(b"p"), 9)]


class Scripted:
    """A generation that has happened already."""

    def __init__(self, *events: Token) -> None:
        self.progress = {
            0: Progress(made=3, started=10.0, first=12.0, last=13.0),
            1: Progress(made=1, started=10.0, first=11.0, last=11.0),
        }
        self._events = events

    def __iter__(self) -> Iterator[Token]:
        return iter(self._events)


@pytest.fixture(scope="module")
def tokenizer(tiny: Callable[..., Path]) -> Tokenizer:
    return load_tokenizer(tiny("llama"), read_config(tiny("llama")))


def run(tokenizer: Tokenizer, *events: Token, **callbacks: Any) -> list[Result]:
    generation: Any = Scripted(*events)
    return collect(generation, REQUESTS, tokenizer, **callbacks)


def test_a_result_per_request(tokenizer: Tokenizer) -> None:
    """Results come in the order of the requests, whichever finishes first."""
    results = run(
        tokenizer,
        Token(0, ord("a")),
        Token(1, ord("x"), "length"),
        Token(0, ord("b")),
        Token(0, ord("c")),
        Token(0, None, "stop"),
    )
    assert results == [
        Result(0, "abc", tuple(b"abc"), "stop", 6, 3, prompt_tps=3.0, generation_tps=2.0),
        Result(1, "x", tuple(b"x"), "length", 1, 1, prompt_tps=1.0, generation_tps=0.0),
    ]


def test_text_comes_as_soon_as_it_is_final(tokenizer: Tokenizer) -> None:
    """Half a character is held back until the rest of it is there, for each request apart."""
    euro = "€".encode()
    seen: list[tuple[int, str]] = []
    results = run(
        tokenizer,
        Token(0, euro[0]),
        Token(1, ord("x"), "length"),
        Token(0, euro[1]),
        Token(0, euro[2]),
        Token(0, ord("!"), "length"),
        on_text=lambda index, text: seen.append((index, text)),
    )
    assert seen == [(1, "x"), (0, "€"), (0, "!")]
    assert results[0].text == "€!"


def test_what_is_held_back_comes_at_the_end(tokenizer: Tokenizer) -> None:
    """A text that ends within a character still shows all of its bytes."""
    seen: list[str] = []
    results = run(
        tokenizer,
        Token(0, "€".encode()[0]),
        Token(0, None, "stop"),
        Token(1, None, "stop"),
        on_text=lambda index, text: seen.append(text),
    )
    assert seen == ["\N{REPLACEMENT CHARACTER}"]
    assert results[0].text == "\N{REPLACEMENT CHARACTER}"
    assert (results[1].text, results[1].tokens, results[1].generation_tps) == ("", (), 0.0)


def test_results_are_told_when_they_are_finished(tokenizer: Tokenizer) -> None:
    """``on_result`` sees the results in the order of finishing."""
    seen: list[Result] = []
    results = run(
        tokenizer,
        Token(1, ord("x"), "length"),
        Token(0, ord("a"), "length"),
        on_result=seen.append,
    )
    assert seen == results[::-1]
