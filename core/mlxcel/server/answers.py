"""The JSON objects of answers: chat or plain text, whole or in chunks.

A field that has nothing to say is absent. The exception is ``finish_reason``, which chunks
have as null until the last one: clients look for it in each.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

Object = dict[str, Any]


def to_json(value: object) -> bytes:
    """``value`` as compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":")).encode()


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Object:
    """What a request used; ``cached_tokens`` of the prompt were known already."""
    used: Object = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens:
        used["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return used


class ChatAnswer:
    """Answers of ``/v1/chat/completions`` from the model ``model``."""

    def __init__(self, model: str) -> None:
        self._head = _head("chatcmpl", model)
        empty = to_json(self._chunk({"content": ""}))
        self._before, _, self._after = empty.rpartition(b'""')

    def whole(self, text: str, finish_reason: str, used: Object) -> Object:
        """The answer to a request that does not stream."""
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": used}

    def opening(self) -> list[bytes]:
        """The chunks that come before the text."""
        return [to_json(self._chunk({"role": "assistant", "content": ""}))]

    def piece(self, text: str) -> bytes:
        """A chunk with some text."""
        return b"".join((self._before, json.dumps(text).encode(), self._after))

    def last(self, finish_reason: str) -> bytes:
        """The chunk that ends the choice."""
        return to_json(self._chunk({}, finish_reason))

    def used(self, used: Object) -> bytes:
        """The chunk with the usage, after the last one."""
        return to_json({**self._head, **_CHAT_CHUNK, "choices": [], "usage": used})

    def _chunk(self, delta: Object, finish_reason: str | None = None) -> Object:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {**self._head, **_CHAT_CHUNK, "choices": [choice]}


class TextAnswer:
    """Answers of ``/v1/completions``; see :class:`ChatAnswer`."""

    def __init__(self, model: str) -> None:
        self._head = _head("cmpl", model) | {"object": "text_completion"}
        self._before, _, self._after = to_json(self._chunk("")).rpartition(b'""')

    def whole(self, text: str, finish_reason: str, used: Object) -> Object:
        return {**self._chunk(text, finish_reason), "usage": used}

    def opening(self) -> list[bytes]:
        return []

    def piece(self, text: str) -> bytes:
        return b"".join((self._before, json.dumps(text).encode(), self._after))

    def last(self, finish_reason: str) -> bytes:
        return to_json(self._chunk("", finish_reason))

    def used(self, used: Object) -> bytes:
        return to_json({**self._head, "choices": [], "usage": used})

    def _chunk(self, text: str, finish_reason: str | None = None) -> Object:
        choice = {"index": 0, "text": text, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}


Answer = ChatAnswer | TextAnswer

_CHAT_CHUNK = {"object": "chat.completion.chunk"}


def _head(prefix: str, model: str) -> Object:
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
