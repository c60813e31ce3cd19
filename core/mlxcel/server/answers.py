"""What the answers of all APIs have in common."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from mlxcel.engine.sequence import Output
from mlxcel.server.choice import Choice
from mlxcel.server.errors import ApiError
from mlxcel.server.parts import Part

Object = dict[str, Any]

DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """Spells an answer, whole or as server-sent events, each ended by an empty line."""

    def whole(self, choices: Sequence[Choice]) -> Object:
        """The answer to a request that does not stream; the choices kept all they took."""
        ...

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """The events before anything else."""
        ...

    def piece(self, choice: Choice, parts: Sequence[Part], output: Output) -> bytes:
        """The events that say ``parts``, which ``output`` brought to ``choice``."""
        ...

    def last(self, choice: Choice) -> bytes:
        """The events that end a choice."""
        ...

    def closing(self, choices: Sequence[Choice], include_usage: bool) -> bytes:
        """The events after everything else."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The event that ends an answer which failed."""
        ...

    def still_here(self) -> bytes:
        """Something that says nothing, to show that the connection lives."""
        ...


def to_json(value: object) -> bytes:
    """``value`` as compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":")).encode()


def event(value: object) -> bytes:
    """``value`` as the data of a server-sent event."""
    return b"data: %b\n\n" % to_json(value)


class TextTemplate:
    """An event in which only one text differs from time to time.

    Args:
        event: The event with an empty string where the text goes, after which no other follows.
    """

    def __init__(self, event: bytes) -> None:
        self._before, _, self._after = event.rpartition(b'""')

    def __call__(self, text: str) -> bytes:
        return b"".join((self._before, encode_basestring_ascii(text).encode(), self._after))


def head(prefix: str, model: str) -> Object:
    """The fields that begin an answer; its id is its own."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}


def usage(choices: Sequence[Choice]) -> Object:
    """What a request used: each prompt counts once, however many choices it has."""
    firsts = [choice for choice in choices if choice.first]
    prompt = sum(len(choice.prompt.tokens) for choice in firsts)
    made = sum(choice.made for choice in choices)
    used: Object = {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }
    if cached := sum(choice.cached for choice in firsts):
        used["prompt_tokens_details"] = {"cached_tokens": cached}
    return used
