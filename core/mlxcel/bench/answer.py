"""One request of a load, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from mlxcel.client.api import Api
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.errors import DeadlineError, MlxcelError, ServerRefusal, ServerUnreachable


@attrs.frozen
class Answer:
    """What a client saw of one answer; all times are seconds of one clock.

    Attributes:
        began: When the request was sent.
        times: When each chunk with text came.
        ended: When the answer was over, or failed.
        asked: The output tokens that were wanted.
        prompt_tokens, cached_tokens: As the server says; 0 where it does not.
        output_tokens: As the server says, else as well as it can be told.
        estimated: Whether the server did not say.
        error: The kind of error that ended it; None for a good answer.
    """

    began: float
    times: tuple[float, ...]
    ended: float
    asked: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    estimated: bool = False
    error: str | None = None


async def ask(
    api: Api, path: str, body: Mapping[str, Any], tokenizer: Tokenizer | None = None
) -> Answer:
    """Send ``body``, which asks for a stream with its usage, and time what comes.

    A chunk may hold several tokens or none, so chunks are counted as tokens only where neither
    the server nor a tokenizer can tell, and the answer is shorter than it was asked to be.
    """
    asked, began = int(body["max_tokens"]), time.perf_counter()
    times: list[float] = []
    texts: list[str] = []
    used: Mapping[str, Any] = {}
    full = False
    try:
        async for chunk in api.stream(path, body):
            now = time.perf_counter()
            if text := _text(chunk):
                times.append(now)
                texts.append(text)
            full = full or _choice(chunk).get("finish_reason") == "length"
            used = chunk["usage"] if isinstance(chunk.get("usage"), dict) else used
    except MlxcelError as error:
        ended = time.perf_counter()
        return Answer(began, tuple(times), ended, asked, error=kind_of(error))
    made = _number(used, "completion_tokens")
    details = used.get("prompt_tokens_details")
    return Answer(
        began,
        tuple(times),
        time.perf_counter(),
        asked,
        _number(used, "prompt_tokens") or 0,
        _number(details if isinstance(details, dict) else {}, "cached_tokens") or 0,
        _estimate(texts, asked if full else None, tokenizer) if made is None else made,
        estimated=made is None,
    )


def kind_of(error: MlxcelError) -> str:
    """A short name for errors of one kind."""
    match error:
        case ServerRefusal(status=None):
            return f"error amid the answer ({error.code or 'no code'})"
        case ServerRefusal():
            return f"status {error.status}" + (f" ({error.code})" if error.code else "")
        case ServerUnreachable():
            return "no connection"
        case DeadlineError():
            return "too late"
        case _:
            return "broken answer"


def _estimate(texts: Sequence[str], full: int | None, tokenizer: Tokenizer | None) -> int:
    if full is not None:
        return full
    if tokenizer is None:
        return len(texts)
    return len(tokenizer.encode("".join(texts), add_special_tokens=False))


def _choice(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    match chunk.get("choices"):
        case [dict() as choice, *_]:
            return choice
        case _:
            return {}


def _text(chunk: Mapping[str, Any]) -> str:
    """What the reader sees of a chunk, thoughts included."""
    choice = _choice(chunk)
    delta = choice.get("delta")
    fields = delta if isinstance(delta, dict) else {}
    parts = (choice.get("text"), fields.get("content"), fields.get("reasoning_content"))
    return "".join(part for part in parts if isinstance(part, str))


def _number(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if type(value) is int and value >= 0 else None
