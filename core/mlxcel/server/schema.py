"""The bodies of requests for text: what is read of them, and what is refused."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import attrs

from mlxcel.pipeline.operations import Sampling
from mlxcel.server.errors import invalid
from mlxcel.server.fields import Fields, quoted

DEFAULT_MAX_TOKENS = 512
MOST_TOKENS = (1 << 31) - 1
MOST_STOPS = 4
MOST_BIASES = 1024
SEED_BITS = 63

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Fields of OpenAI's that would change the answer, with the values that ask for nothing."""


@attrs.frozen
class Generation:
    """What both kinds of requests say about the text they want."""

    model: str | None
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignore_eos: bool = False


@attrs.frozen
class ChatRequest:
    """The body of ``/v1/chat/completions``."""

    generation: Generation
    messages: tuple[Mapping[str, Any], ...]


@attrs.frozen
class CompletionRequest:
    """The body of ``/v1/completions``."""

    generation: Generation
    prompt: str


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Check the body of a chat request.

    Raises:
        ApiError: A field is missing, is not what it must be, or asks for what is not supported.
    """
    fields = Fields(body)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.wrong("messages", "a list of one message or more")
    for index, message in enumerate(messages):
        _check_message(message, index)
    return ChatRequest(_read_generation(fields), tuple(messages))


def read_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Check the body of a completion request.

    Raises:
        ApiError: As :func:`read_chat`.
    """
    fields = Fields(body)
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        text = "'prompt' must be a string: lists of prompts or token ids are not supported."
        raise invalid(text, "prompt", "unsupported_parameter")
    if not isinstance(prompt, str):
        raise fields.wrong("prompt", "a string")
    return CompletionRequest(_read_generation(fields), prompt)


def _read_generation(fields: Fields) -> Generation:
    for name in fields.names():
        if name in UNSUPPORTED and not _asks_for_nothing(name, fields.get(name)):
            text = f"'{name}' is not supported by this server; leave it out."
            raise invalid(text, name, "unsupported_parameter")
    stream = fields.flag("stream")
    stream_options = fields.object("stream_options")
    if stream_options is not None and not stream:
        text = "'stream_options' is only allowed where 'stream' is true."
        raise invalid(text, "stream_options", "invalid_value")
    limits = [
        fields.integer(name, 1, MOST_TOKENS) for name in ("max_completion_tokens", "max_tokens")
    ]
    return Generation(
        model=fields.text("model"),
        max_tokens=next((limit for limit in limits if limit is not None), DEFAULT_MAX_TOKENS),
        sampling=_read_sampling(fields),
        stop=_read_stop(fields),
        stream=stream,
        include_usage=stream_options is not None and stream_options.flag("include_usage"),
        ignore_eos=fields.flag("ignore_eos"),
    )


def _asks_for_nothing(name: str, value: object) -> bool:
    # 0 equals False to Python, and to nobody else.
    return any(type(value) is type(same) and value == same for same in UNSUPPORTED[name])


def _read_sampling(fields: Fields) -> Sampling:
    def number(name: str, low: float, high: float, default: float) -> float:
        value = fields.number(name, low, high)
        return default if value is None else value

    top_p = number("top_p", 0, 1, 1.0)
    penalty = number("repetition_penalty", 0, 100, 1.0)
    for name, value in (("top_p", top_p), ("repetition_penalty", penalty)):
        if value == 0:
            raise fields.wrong(name, "above 0")
    seed = fields.integer("seed", -(1 << SEED_BITS), (1 << SEED_BITS) - 1)
    bias = _read_logit_bias(fields)
    return Sampling(
        temperature=number("temperature", 0, 2, 0.0),
        top_p=top_p,
        top_k=fields.integer("top_k", 0, MOST_TOKENS) or 0,
        min_p=number("min_p", 0, 1, 0.0),
        seed=secrets.randbits(SEED_BITS) if seed is None else seed,
        repetition_penalty=penalty,
        presence_penalty=number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=number("frequency_penalty", -2, 2, 0.0),
        bias_tokens=tuple(bias),
        bias_values=tuple(bias.values()),
    )


def _read_logit_bias(fields: Fields) -> dict[int, float]:
    given = fields.object("logit_bias")
    if given is None:
        return {}
    names = list(given.names())
    if len(names) > MOST_BIASES:
        raise fields.wrong("logit_bias", f"an object of {MOST_BIASES} tokens at most")
    biases: dict[int, float] = {}
    for name in names:
        # Digits of other scripts are digits to Python too.
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            text = f"'logit_bias' must have token ids as names, not {quoted(name)}."
            raise invalid(text, "logit_bias", "invalid_value")
        value = given.number(name, -100, 100)
        assert value is not None
        biases[int(name)] = value
    return biases


def _read_stop(fields: Fields) -> tuple[str, ...]:
    given = fields.get("stop")
    stops = [given] if isinstance(given, str) else [] if given is None else given
    fits = isinstance(stops, list) and len(stops) <= MOST_STOPS
    if not fits or not all(isinstance(stop, str) and stop for stop in stops):
        raise fields.wrong("stop", f"a string or a list of {MOST_STOPS} at most, none empty")
    return tuple(stops)


def _check_message(message: object, index: int) -> None:
    path = f"messages[{index}]"
    if not isinstance(message, dict):
        text = f"'{path}' must be an object, not {quoted(message)}."
        raise invalid(text, path, "invalid_value")
    fields = Fields(message, f"{path}.")
    if fields.text("role") is None:
        raise fields.wrong("role", "a string")
    content = fields.get("content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            _check_part(part, f"{path}.content[{number}]")
    elif (content is None and message["role"] != "assistant") or (
        content is not None and not isinstance(content, str)
    ):
        raise fields.wrong("content", "a string or a list of text parts")


def _check_part(part: object, path: str) -> None:
    if not isinstance(part, dict):
        raise invalid(f"'{path}' must be an object, not {quoted(part)}.", path, "invalid_value")
    kind = part.get("type")
    if kind != "text":
        text = f"'{path}' is of type {quoted(kind)}; this server reads text only."
        raise invalid(text, path, "unsupported_parameter")
    if not isinstance(part.get("text"), str):
        raise Fields(part, f"{path}.").wrong("text", "a string")
