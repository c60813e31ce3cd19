"""Answers of Anthropic's ``/v1/messages``: blocks of text, thoughts and uses of tools."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from mlxcel.engine.sequence import Output
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.server.answers import Object, TextTemplate, to_json
from mlxcel.server.choice import Choice
from mlxcel.server.errors import ApiError
from mlxcel.server.parts import Content, Part, Reasoning, ToolCall

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> Object:
    """The JSON object that tells of ``error`` in Anthropic's terms."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    told = {"type": ERROR_TYPES.get(error.status, kind), "message": error.message}
    return {"type": "error", "error": told}


class MessagesAnswer:
    """See :class:`mlxcel.server.answers.Answer`; there is one choice.

    Args:
        model: The model's name.
        tokenizer: Spells the text in which to look for what ended it.
        stops: The strings that the client wants to end the text.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._model = model
        self._id = f"msg_{secrets.token_hex(12)}"
        self._tokenizer = tokenizer
        self._stops = stops
        self._blocks = 0
        self._open: type[Part] | None = None
        self._spell: TextTemplate | None = None

    def whole(self, choices: Sequence[Choice]) -> Object:
        [choice] = choices
        return {
            **self._head(_blocks(choice.parts)),
            **self._stop(choice),
            "usage": {**_input_usage(choice), "output_tokens": choice.made},
        }

    def opening(self, choices: Sequence[Choice]) -> bytes:
        [choice] = choices
        # What was known of the prompt is told at the end.
        used = {"input_tokens": len(choice.prompt.tokens), "output_tokens": 0}
        message = {**self._head([]), "stop_reason": None, "stop_sequence": None, "usage": used}
        return _event("message_start", {"message": message}) + self.still_here()

    def piece(self, choice: Choice, parts: Sequence[Part], output: Output) -> bytes:
        return b"".join([self._part(part) for part in parts])

    def last(self, choice: Choice) -> bytes:
        used = {**_input_usage(choice), "output_tokens": choice.made}
        delta = _event("message_delta", {"delta": self._stop(choice), "usage": used})
        return self._close() + delta

    def closing(self, choices: Sequence[Choice], include_usage: bool) -> bytes:
        return _event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        return _event("error", {"error": error_body(error)["error"]})

    def still_here(self) -> bytes:
        return _event("ping", {})

    def _part(self, part: Part) -> bytes:
        match part:
            case ToolCall(id, name, arguments):
                use = {"type": "tool_use", "id": id, "name": name, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": arguments}
                before = self._close()
                return b"".join((before, self._begin(use), self._delta(delta), self._end_block()))
            case Content(text):
                start, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": ""}
            case Reasoning(text):
                start = {"type": "thinking", "thinking": "", "signature": ""}
                delta = {"type": "thinking_delta", "thinking": ""}
        if self._open is type(part) and self._spell is not None:
            return self._spell(text)
        before = self._close() + self._begin(start)
        self._open, self._spell = type(part), TextTemplate(self._delta(delta))
        return before + self._spell(text)

    def _begin(self, block: Object) -> bytes:
        return _event("content_block_start", {"index": self._blocks, "content_block": block})

    def _delta(self, delta: Object) -> bytes:
        return _event("content_block_delta", {"index": self._blocks, "delta": delta})

    def _end_block(self) -> bytes:
        self._blocks += 1
        return _event("content_block_stop", {"index": self._blocks - 1})

    def _close(self) -> bytes:
        """End the block of text or thoughts that is open, if one is."""
        if self._open is None:
            return b""
        thought, self._open = self._open is Reasoning, None
        signed = self._delta({"type": "signature_delta", "signature": ""}) if thought else b""
        return signed + self._end_block()

    def _head(self, content: list[Object]) -> Object:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _stop(self, choice: Choice) -> Object:
        """Why the text ended; a string of the client's only if it was one."""
        found = None
        if choice.reason() == "stop" and not choice.ended_itself:
            found = first_stop(self._tokenizer.decode(choice.tokens), self._stops)
        reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
        reason = reasons[choice.reason()] if found is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": found}


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The one of ``stops`` that is complete first in ``text``; of several at once, the longest."""
    ends = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(ends)[2] if ends else None


def _blocks(parts: Sequence[Part]) -> list[Object]:
    blocks: list[dict[str, Any]] = []
    for part in parts:
        last: dict[str, Any] = blocks[-1] if blocks else {"type": None}
        match part:
            case Content(text) if last["type"] == "text":
                last["text"] += text
            case Content(text):
                blocks.append({"type": "text", "text": text})
            case Reasoning(text) if last["type"] == "thinking":
                last["thinking"] += text
            case Reasoning(text):
                blocks.append({"type": "thinking", "thinking": text, "signature": ""})
            case ToolCall(id, name, arguments):
                use = {"type": "tool_use", "id": id, "name": name, "input": json.loads(arguments)}
                blocks.append(use)
    return blocks


def _input_usage(choice: Choice) -> Object:
    """Tokens of the prompt: those that were known already count apart."""
    used = {"input_tokens": len(choice.prompt.tokens) - choice.cached}
    return {**used, "cache_read_input_tokens": choice.cached} if choice.cached else used


def _event(kind: str, fields: Object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, **fields}))
