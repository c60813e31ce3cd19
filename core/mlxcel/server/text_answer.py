"""Answers of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence

from mlxcel.engine.sequence import Output
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.server.answers import DONE, Object, TextTemplate, event, head, usage
from mlxcel.server.choice import Choice, joined_content
from mlxcel.server.errors import ApiError
from mlxcel.server.logprobs import TextLogprobs
from mlxcel.server.parts import Part


class TextAnswer:
    """See :class:`mlxcel.server.answers.Answer`; a choice may begin with its prompt's text.

    Args:
        model: The model's name.
        tokenizer: Spells the tokens of log-probabilities.
        with_logprobs: Whether the answer has log-probabilities.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, with_logprobs: bool = False) -> None:
        self._head = head("cmpl", model) | {"object": "text_completion"}
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._text: dict[int, TextTemplate] = {}
        self._logprobs: dict[int, TextLogprobs] = {}

    def whole(self, choices: Sequence[Choice]) -> Object:
        found = [self._choice(choice) for choice in choices]
        return {**self._head, "choices": found, "usage": usage(choices)}

    def opening(self, choices: Sequence[Choice]) -> bytes:
        return b"".join(
            self._chunk(choice.index, choice.prompt.echo)
            for choice in choices
            if choice.prompt.echo
        )

    def piece(self, choice: Choice, parts: Sequence[Part], output: Output) -> bytes:
        if self._with_logprobs and output.tokens:
            drawn = list(zip(output.tokens, output.logprobs, strict=True))
            found = self._logprobs_of(choice).take(drawn)
            return self._chunk(choice.index, joined_content(parts), None, found)
        if not parts:
            return b""
        if (spell := self._text.get(choice.index)) is None:
            spell = TextTemplate(self._chunk(choice.index, ""))
            self._text[choice.index] = spell
        return spell(joined_content(parts))

    def last(self, choice: Choice) -> bytes:
        return self._chunk(choice.index, "", choice.reason())

    def closing(self, choices: Sequence[Choice], include_usage: bool) -> bytes:
        if not include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": usage(choices)}) + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())

    def still_here(self) -> bytes:
        return b": keep-alive\n\n"

    def _choice(self, choice: Choice) -> Object:
        text = choice.prompt.echo + joined_content(choice.parts)
        made: Object = {"index": choice.index, "text": text}
        if self._with_logprobs:
            made["logprobs"] = self._logprobs_of(choice).take(choice.drawn)
        return {**made, "finish_reason": choice.reason()}

    def _logprobs_of(self, choice: Choice) -> TextLogprobs:
        if choice.index not in self._logprobs:
            offset = len(choice.prompt.echo)
            self._logprobs[choice.index] = TextLogprobs(self._tokenizer, offset)
        return self._logprobs[choice.index]

    def _chunk(
        self,
        index: int,
        text: str,
        finish_reason: str | None = None,
        logprobs: Object | None = None,
    ) -> bytes:
        choice: Object = {"index": index, "text": text}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        choice["finish_reason"] = finish_reason
        return event({**self._head, "choices": [choice]})
