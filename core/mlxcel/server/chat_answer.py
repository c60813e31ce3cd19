"""Answers of ``/v1/chat/completions``.

A field that has nothing to say is absent. The exceptions are ``content``, which is null beside
calls and else a string, and ``finish_reason``, which chunks have as null until the last one:
clients look for them in each.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxcel.engine.sequence import Output
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.server.answers import DONE, Object, TextTemplate, event, head, usage
from mlxcel.server.choice import Choice, joined_content, joined_reasoning
from mlxcel.server.errors import ApiError
from mlxcel.server.logprobs import chat_logprobs
from mlxcel.server.parts import Content, Part, Reasoning, ToolCall

_KIND, _CHUNK = {"object": "chat.completion"}, {"object": "chat.completion.chunk"}


class ChatAnswer:
    """See :class:`mlxcel.server.answers.Answer`.

    Args:
        model: The model's name.
        tokenizer: Spells the tokens of log-probabilities.
        with_logprobs: Whether the answer has log-probabilities.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, with_logprobs: bool = False) -> None:
        self._head = head("chatcmpl", model)
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._content: dict[int, TextTemplate] = {}
        self._reasoning: dict[int, TextTemplate] = {}
        self._calls: dict[int, int] = {}

    def whole(self, choices: Sequence[Choice]) -> Object:
        found = [self._choice(choice) for choice in choices]
        return {**self._head, **_KIND, "choices": found, "usage": usage(choices)}

    def opening(self, choices: Sequence[Choice]) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice.index, delta) for choice in choices)

    def piece(self, choice: Choice, parts: Sequence[Part], output: Output) -> bytes:
        if self._with_logprobs and output.tokens:
            return self._piece_with_logprobs(choice, parts, output)
        return b"".join([self._part(choice.index, part) for part in parts])

    def last(self, choice: Choice) -> bytes:
        return self._chunk(choice.index, {}, choice.reason())

    def closing(self, choices: Sequence[Choice], include_usage: bool) -> bytes:
        if not include_usage:
            return DONE
        return event({**self._head, **_CHUNK, "choices": [], "usage": usage(choices)}) + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())

    def still_here(self) -> bytes:
        return b": keep-alive\n\n"

    def _choice(self, choice: Choice) -> Object:
        calls = [_call(part) for part in choice.parts if isinstance(part, ToolCall)]
        content = joined_content(choice.parts)
        message: Object = {"role": "assistant", "content": content or (None if calls else "")}
        if reasoning := joined_reasoning(choice.parts):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        made: Object = {"index": choice.index, "message": message}
        if self._with_logprobs:
            made["logprobs"] = {"content": chat_logprobs(self._tokenizer, choice.drawn)}
        return {**made, "finish_reason": choice.reason()}

    def _part(self, index: int, part: Part) -> bytes:
        match part:
            case Content(text):
                if (spell := self._content.get(index)) is None:
                    spell = TextTemplate(self._chunk(index, {"content": ""}))
                    self._content[index] = spell
                return spell(text)
            case Reasoning(text):
                if (spell := self._reasoning.get(index)) is None:
                    spell = TextTemplate(self._chunk(index, {"reasoning_content": ""}))
                    self._reasoning[index] = spell
                return spell(text)
        return self._chunk(index, self._delta(index, part))

    def _delta(self, index: int, part: Part) -> Object:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case ToolCall():
                number = self._calls.get(index, 0)
                self._calls[index] = number + 1
                return {"tool_calls": [{"index": number, **_call(part)}]}

    def _piece_with_logprobs(self, choice: Choice, parts: Sequence[Part], output: Output) -> bytes:
        """All parts, the first with the log-probabilities; they come even if there is no part."""
        drawn = list(zip(output.tokens, output.logprobs, strict=True))
        found = {"content": chat_logprobs(self._tokenizer, drawn)}
        first, *others = [self._delta(choice.index, part) for part in parts] or [{"content": ""}]
        chunks = [self._chunk(choice.index, first, None, found)]
        return b"".join([*chunks, *(self._chunk(choice.index, delta) for delta in others)])

    def _chunk(
        self,
        index: int,
        delta: Object,
        finish_reason: str | None = None,
        logprobs: Object | None = None,
    ) -> bytes:
        choice: Object = {"index": index, "delta": delta}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        choice["finish_reason"] = finish_reason
        return event({**self._head, **_CHUNK, "choices": [choice]})


def _call(call: ToolCall) -> Object:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
