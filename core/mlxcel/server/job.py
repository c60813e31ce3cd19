"""What a request comes down to: prompts, how to go on with them, and how to read the text."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from mlxcel.engine.grammar import json_object_grammar, json_schema_grammar
from mlxcel.engine.slot import Request
from mlxcel.errors import MlxcelError
from mlxcel.server.choice import Choice, Prompt
from mlxcel.server.errors import invalid
from mlxcel.server.readers import Reader
from mlxcel.server.schema import JSON_OBJECT, SEED_BITS, Generation


@attrs.frozen
class Job:
    """Every prompt gets ``generation.choices`` answers, each read by a ``reader`` of its own.

    ``grammar`` is what each text must match, if anything.
    """

    generation: Generation
    prompts: tuple[Prompt, ...]
    reader: Callable[[Prompt], Reader]
    grammar: str | None = None

    def choices(self) -> list[Choice]:
        """The choices of the answer: all of the first prompt, then all of the second, …"""
        count = self.generation.choices
        return [
            Choice(number * count + sibling, prompt, sibling == 0, self.reader(prompt))
            for number, prompt in enumerate(self.prompts)
            for sibling in range(count)
        ]

    def requests(self, context_size: int | None) -> list[Request]:
        """What the engine is asked for each choice, in their order; numbers are still to come.

        Where the client gave a seed, each prompt is answered as it would be alone.
        """
        return [
            self._request(prompt, seed, sibling, context_size)
            for prompt, seed in zip(self.prompts, self._seeds(), strict=True)
            for sibling in range(self.generation.choices)
        ]

    def _seeds(self) -> list[int]:
        first, others = self.generation.sampling.seed, len(self.prompts) - 1
        if self.generation.seeded:
            return [first] * (1 + others)
        return [first, *(secrets.randbits(SEED_BITS) for _ in range(others))]

    def _request(self, prompt: Prompt, seed: int, sibling: int, context: int | None) -> Request:
        wanted = self.generation
        most = wanted.max_tokens
        return Request(
            index=0,
            prompt=prompt.tokens,
            max_tokens=most if context is None else min(most, context - len(prompt.tokens)),
            sampling=attrs.evolve(wanted.sampling, seed=seed, choice=sibling),
            stop=wanted.stop,
            ignore_end=wanted.ignore_eos,
            grammar=self.grammar,
        )


def grammar_of(schema: Mapping[str, Any], param: str) -> str:
    """The grammar of the JSON values that ``schema`` describes.

    Raises:
        ApiError: The schema cannot be used; ``param`` is the field that it came with.
    """
    try:
        return json_object_grammar() if schema is JSON_OBJECT else json_schema_grammar(schema)
    except MlxcelError as error:
        raise invalid(str(error), param, "unsupported_schema") from error
