"""Grammars on the last stage: which tokens may come next in a row's text.

llguidance parses a text as its tokens come and computes the set of tokens that can follow it
(Earley parsing over a lexer of regular expression derivatives, walked along the vocabulary's
trie). It reads the checkpoint's own tokenizer.json.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_COMPILED = 16
"""Grammars that are kept compiled, the least recently used going first."""

MOST_LEXER_STATES = 32_768
"""What one grammar may grow to in memory, at 1 to 2 kB each."""


class Matcher:
    """One row's place in its grammar; a deep copy goes on without its source.

    Attributes:
        problem: Why the row cannot go on; None as long as it can.
    """

    def __init__(self, place: LLMatcher | None, problem: str | None = None) -> None:
        self.problem = problem
        self._place = place

    def __deepcopy__(self, memo: dict[int, Any]) -> Matcher:
        return Matcher(self._place.deep_copy() if self._place else None, self.problem)

    def allowed(self, width: int) -> mx.array | None:
        """The tokens that may come next, bool [width]; None if the row cannot go on.

        End tokens are among them exactly where the text is complete, and alone where nothing
        can follow.
        """
        if self._place is None or self.problem is not None:
            return None
        bits = np.frombuffer(self._place.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=width, bitorder="little").view(np.bool_)
        self._look()
        if self.problem is None and not mask.any():
            self.problem = "the model has none of the tokens that could follow"
        return None if self.problem is not None else mx.array(mask)

    def take(self, token: int) -> None:
        """Go on by the token that was drawn, which must be allowed."""
        if self._place is not None and self.problem is None:
            self._place.consume_token(token)
            self._look()

    def _look(self) -> None:
        assert self._place is not None
        if self._place.is_error():
            self.problem = _first_line(self._place.get_error())


class Grammars:
    """Makes the matchers of one model.

    Args:
        tokenizer: The checkpoint's tokenizer.json; read when the first grammar comes.
    """

    def __init__(self, tokenizer: Path) -> None:
        self._path = tokenizer
        self._tokenizer = lru_cache(maxsize=1)(self._read_tokenizer)
        self._compiled = lru_cache(maxsize=MOST_COMPILED)(self._compile)

    def matcher(self, grammar: str, ends: tuple[int, ...]) -> Matcher:
        """The beginning of a text.

        Args:
            grammar: In llguidance's own notation.
            ends: The tokens that end a text.

        Returns:
            A matcher that has a problem if the grammar or the tokenizer cannot be used.
        """
        try:
            return copy.deepcopy(self._compiled(grammar, ends))
        except (OSError, ValueError) as error:
            return Matcher(None, f"{self._path}: {_first_line(str(error))}")

    def _compile(self, grammar: str, ends: tuple[int, ...]) -> Matcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)
        matcher = Matcher(LLMatcher(self._tokenizer(ends), grammar, log_level=0, limits=limits))
        matcher._look()
        return matcher

    def _read_tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer:
        from llguidance import LLTokenizer

        text = self._path.read_text(encoding="utf-8")
        try:
            return LLTokenizer(text, eos_token=list(ends))
        except ValueError:
            # The model may end with ids that the tokenizer lacks, beside others.
            size = LLTokenizer(text).vocab_size
        known = [end for end in ends if end < size]
        if not known:
            raise ValueError("it knows none of the model's end tokens, so no text can end")
        return LLTokenizer(text, eos_token=known)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
