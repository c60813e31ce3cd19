"""Grammars on the last stage: which tokens may come next in a row's text.

llguidance parses a text as its tokens come and computes the set of tokens that can follow it
(Earley parsing over a lexer of regular expression derivatives, walked along the vocabulary's
trie). It reads the checkpoint's own tokenizer.json.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import attrs
import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_LEXER_STATES = 32_768
"""What one grammar may grow to in memory, at 1 to 2 kB each."""


@attrs.frozen(eq=False)
class Compiled:
    """A grammar at the beginning of a text; what its texts work out in the lexer, they share."""

    start: LLMatcher


class Grammars:
    """Makes the matchers of one model.

    Args:
        tokenizer: The checkpoint's tokenizer.json; read when the first grammar comes.
    """

    def __init__(self, tokenizer: Path) -> None:
        self.path = tokenizer
        self._tokenizer = lru_cache(maxsize=1)(self._read_tokenizer)
        # A lexer only ever grows, so it goes with the last text that uses it.
        self._compiled: WeakValueDictionary[tuple[str, tuple[int, ...]], Compiled]
        self._compiled = WeakValueDictionary()

    def matcher(self, grammar: str, ends: tuple[int, ...]) -> Matcher:
        """The beginning of a text.

        Args:
            grammar: In llguidance's own notation.
            ends: The tokens that end a text.
        """
        return Matcher(self, grammar, ends)

    def compiled(self, grammar: str, ends: tuple[int, ...]) -> Compiled:
        """The compiled grammar, which may have an error.

        Raises:
            OSError: The tokenizer cannot be read.
            ValueError: llguidance does not take it, or it knows none of the end tokens.
        """
        from llguidance import LLMatcher, LLParserLimits

        if (found := self._compiled.get((grammar, ends))) is not None:
            return found
        limits = LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)
        made = Compiled(LLMatcher(self._tokenizer(ends), grammar, log_level=0, limits=limits))
        self._compiled[grammar, ends] = made
        return made

    def _read_tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer:
        from llguidance import LLTokenizer

        text = self.path.read_text(encoding="utf-8")
        try:
            return LLTokenizer(text, eos_token=list(ends))
        except ValueError:
            # The model may end with ids that the tokenizer lacks, beside others.
            size = LLTokenizer(text).vocab_size
        known = [end for end in ends if end < size]
        if not known:
            raise ValueError("it knows none of the model's end tokens, so no text can end")
        return LLTokenizer(text, eos_token=known)


class Matcher:
    """One row's place in its grammar.

    It begins when it is first asked. A deep copy has the tokens so far and begins for itself, so
    one that is never asked costs nothing.

    Attributes:
        problem: Why the row cannot go on; None as long as it can.
    """

    def __init__(
        self,
        grammars: Grammars,
        grammar: str,
        ends: tuple[int, ...],
        tokens: tuple[int, ...] = (),
    ) -> None:
        self.problem: str | None = None
        self._grammars = grammars
        self._grammar = grammar
        self._ends = ends
        self._tokens = list(tokens)
        self._compiled: Compiled | None = None
        self._place: LLMatcher | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Matcher:
        return Matcher(self._grammars, self._grammar, self._ends, tuple(self._tokens))

    def allowed(self, width: int) -> mx.array | None:
        """The tokens that may come next, bool [width]; None if the row cannot go on.

        End tokens are among them exactly where the text is complete, and alone where nothing
        can follow.
        """
        if self._place is None:
            self._begin()
        if self._place is None or self.problem is not None:
            return None
        bits = np.frombuffer(self._place.compute_bitmask(), np.uint8)
        self._look(self._place)
        mask = np.unpackbits(bits, count=width, bitorder="little").view(np.bool_)
        if self.problem is None and not mask.any():
            self.problem = "the model has none of the tokens that could follow"
        return None if self.problem is not None else mx.array(mask)

    def take(self, token: int) -> None:
        """Go on by the token that was drawn, which must be allowed."""
        self._tokens.append(token)
        if self._place is not None and self.problem is None:
            self._place.consume_token(token)
            self._look(self._place)

    def _begin(self) -> None:
        if self.problem is not None:
            return
        try:
            self._compiled = self._grammars.compiled(self._grammar, self._ends)
        except (OSError, ValueError) as error:
            self.problem = f"{self._grammars.path}: {_first_line(str(error))}"
            return
        self._place = self._compiled.start.deep_copy()
        for token in self._tokens:
            self._place.consume_token(token)
        self._look(self._place)

    def _look(self, place: LLMatcher) -> None:
        if place.is_error():
            said = _first_line(place.get_error())
            self.problem = _STOPS.get(said, said)


_STOPS = {"NoExtensionBias": "no text matches it"}
"""Reasons to stop that llguidance gives as bare names."""


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
