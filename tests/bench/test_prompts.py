"""Made-up prompts: their length, and that no two are alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel.bench.prompts import WORDS, Prompts
from mlxcel.checkpoint.config import read_config
from mlxcel.engine.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def tokenizer(tiny: Callable[..., Path]) -> Tokenizer:
    folder = tiny("llama")
    return load_tokenizer(folder, read_config(folder))


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_the_length_in_tokens(tokenizer: Tokenizer, length: int) -> None:
    """A prompt has exactly so many tokens, and without a tokenizer so many words."""
    assert len(tokenizer.encode(Prompts("1", tokenizer).draw(length))) == length
    assert len(Prompts("1").draw(length).split()) == length


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 5, 64, 200])
def test_the_length_with_a_real_tokenizer(demo_model: Path, length: int) -> None:
    """The same with the merges of a real vocabulary."""
    real = load_tokenizer(demo_model, read_config(demo_model))
    prompts = Prompts("1", real, Prompts("2", real).draw(3))
    assert all(len(real.encode(prompts.draw(length + 3))) == length + 3 for _ in range(20))


def test_no_two_are_alike(tokenizer: Tokenizer) -> None:
    """Within a series and across series; one seed draws one series."""
    for known in (tokenizer, None):
        first, again, other = Prompts("1", known), Prompts("1", known), Prompts("2", known)
        drawn = [first.draw(32) for _ in range(50)]
        assert [again.draw(32) for _ in range(50)] == drawn
        assert len({*drawn, *(other.draw(32) for _ in range(50))}) == 100


def test_a_common_beginning(tokenizer: Tokenizer) -> None:
    """All begin with it, differ after it, and have the wanted length all the same."""
    for known in (tokenizer, None):
        start = Prompts("start", known).draw(12)
        prompts = Prompts("1", known, start)
        one, two = prompts.draw(30), prompts.draw(30)
        assert one.startswith(start) and two.startswith(start) and one != two
        assert len(tokenizer.encode(one) if known else one.split()) == 30


def test_the_words() -> None:
    """Each once, in small ASCII letters."""
    assert len(set(WORDS)) == len(WORDS) > 200
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)
