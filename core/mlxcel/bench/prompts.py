"""Made-up prompts of a wanted length that no cache knows."""

from __future__ import annotations

import random

from mlxcel.engine.tokenizer import Tokenizer

WORDS = """
able about above across after again air all along also always among and animal answer any
apple area arm around ask away baby back ball bank base bear beat bed before begin behind
bell best better between big bird black blood blue board boat body bone book both bottom box
boy branch bread bring broad brother brown build bus busy buy call came camp can capital
captain car card care carry case cat catch cause cell center chair chance change chief child
choose circle city claim class clean clear climb clock close clothes cloud coast coat cold
color come common company complete control cook cool copy corn corner cost country course
cover cow create cross crowd cry cut dance dark day dead deal dear deep desert design did die
door down draw dream dress drink drive drop dry during each ear early earth east easy eat edge
effect egg eight end energy enough enter equal even evening ever every exact example eye face
fact fall family far farm fast father feel feet few field fight fill final find fine finger
finish fire first fish fit five floor flow flower fly follow food foot force forest form
forward found four free fresh friend from front fruit full game garden gave general gentle
girl give glad glass gold good got govern grand grass gray great green ground group grow
""".split()
"""Common short words; most vocabularies have each as one token behind a space."""

TRIES = 8


class Prompts:
    """Draws prompts; the same seed draws the same ones.

    Args:
        seed: Whatever tells one series of prompts from another.
        tokenizer: Says what a token is, BOS and the like included; without it, a word is one.
        start: What all prompts begin with.
    """

    def __init__(self, seed: str, tokenizer: Tokenizer | None = None, start: str = "") -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._start = start

    def draw(self, length: int) -> str:
        """A prompt of ``length`` tokens, unlike any other.

        A cut amid a word may come out as other tokens than those that were cut; another draw
        helps then, and for a tokenizer with which none does, the last draw is taken.
        """
        if self._tokenizer is None:
            known = self._start.split()
            return " ".join([*known, *self._words(length - len(known))])
        text = self._start
        for _ in range(TRIES):
            words = " ".join([*self._start.split(), *self._words(length)])
            text = self._tokenizer.decode(self._tokenizer.encode(words)[:length])
            if len(self._tokenizer.encode(text)) == length:
                break
        return text

    def _words(self, count: int) -> list[str]:
        return self._random.choices(WORDS, k=max(0, count))
