"""What all requests for text say about it: how to draw it, how long it may be, its form."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import attrs

from mlxcel.pipeline.operations import Sampling
from mlxcel.server.errors import invalid
from mlxcel.server.fields import Fields, quoted
from mlxcel.server.unsupported import UNSUPPORTED, WINDOWS, Refused, refuse_unsupported

DEFAULT_MAX_TOKENS = 512
MOST_TOKENS = (1 << 31) - 1
MOST_CHOICES = 128
MOST_STOPS = 16
MOST_BIASES = 1024
MOST_LOGPROBS = 20
SEED_BITS = 63

JSON_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of any JSON object."""


@attrs.frozen
class Generation:
    """What requests of all kinds say about the text they want.

    Attributes:
        model: The name the client calls the model by.
        max_tokens: Tokens of one choice at most.
        sampling: How tokens are drawn; ``choice`` is 0.
        seeded: Whether the client gave the seed.
        stop: Strings that end the text.
        stream: Whether the answer comes as events.
        include_usage: Whether the last event says what was used.
        choices: How many answers each prompt gets.
        ignore_eos: Whether the model's end tokens end nothing.
        schema: The JSON schema that the text must match, if any.
    """

    model: str | None
    max_tokens: int
    sampling: Sampling
    seeded: bool = False
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    choices: int = 1
    ignore_eos: bool = False
    schema: Mapping[str, Any] | None = None


def read_generation(
    fields: Fields, unsupported: Mapping[str, Refused], logprobs: int | None
) -> Generation:
    """Read what the two APIs of OpenAI's have in common.

    Args:
        fields: The body.
        unsupported: Fields that this API does not support, beside :data:`UNSUPPORTED`.
        logprobs: How many log-probabilities are wanted; None for none.

    Raises:
        ApiError: A field is not what it must be, or asks for what is not supported.
    """
    refuse_unsupported(fields, {**UNSUPPORTED, **unsupported})
    stream = fields.flag("stream")
    stream_options = fields.object("stream_options")
    if stream_options is not None and not stream:
        text = "'stream_options' is only allowed where 'stream' is true."
        raise invalid(text, "stream_options", "invalid_value")
    limits = [
        fields.integer(name, 1, MOST_TOKENS) for name in ("max_completion_tokens", "max_tokens")
    ]
    choices = fields.integer("n", 1, MOST_CHOICES) or 1
    if (fields.integer("best_of", 1, MOST_CHOICES) or choices) != choices:
        text = "'best_of' is not supported unless it equals 'n'; take the best of 'n' yourself."
        raise invalid(text, "best_of", "unsupported_parameter")
    return Generation(
        model=fields.text("model"),
        max_tokens=next((limit for limit in limits if limit is not None), DEFAULT_MAX_TOKENS),
        sampling=read_sampling(fields, logprobs),
        seeded=read_seed(fields) is not None,
        stop=read_stop(fields, "stop"),
        stream=stream,
        include_usage=stream_options is not None and stream_options.flag("include_usage"),
        choices=choices,
        ignore_eos=fields.flag("ignore_eos"),
        schema=read_response_format(fields),
    )


def read_response_format(fields: Fields) -> Mapping[str, Any] | None:
    """The schema that ``response_format`` asks for; None if any text will do."""
    form = fields.object("response_format")
    if form is None:
        return None
    match form.text("type"):
        case "text":
            return None
        case "json_object":
            return _schema(form, "schema") or JSON_OBJECT
        case "json_schema":
            inner = form.object("json_schema")
            if inner is None:
                raise form.wrong("json_schema", "an object with a 'schema'")
            return _schema(inner, "schema") or JSON_OBJECT
    raise form.wrong("type", "text, json_object or json_schema")


def _schema(fields: Fields, name: str) -> Mapping[str, Any] | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise fields.wrong(name, "a JSON schema")
    return value


def read_sampling(fields: Fields, logprobs: int | None = None) -> Sampling:
    """How to draw; a seed is drawn where the client gives none."""

    def number(name: str, low: float, high: float, default: float) -> float:
        value = fields.number(name, low, high)
        return default if value is None else value

    top_p = number("top_p", 0, 1, 1.0)
    penalty = number("repetition_penalty", 0, 100, 1.0)
    for name, value in (("top_p", top_p), ("repetition_penalty", penalty)):
        if value == 0:
            raise fields.wrong(name, "above 0")
    seed = read_seed(fields)
    bias = _read_logit_bias(fields)
    sampling = Sampling(
        temperature=number("temperature", 0, 2, 0.0),
        top_p=top_p,
        top_k=max(0, fields.integer("top_k", -1, MOST_TOKENS) or 0),  # -1 is off, as to vLLM
        min_p=number("min_p", 0, 1, 0.0),
        seed=secrets.randbits(SEED_BITS) if seed is None else seed,
        repetition_penalty=penalty,
        presence_penalty=number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=number("frequency_penalty", -2, 2, 0.0),
        bias_tokens=tuple(bias),
        bias_values=tuple(bias.values()),
        logprobs=logprobs,
    )
    if sampling.looks_back:
        refuse_unsupported(fields, WINDOWS)
    return sampling


def read_seed(fields: Fields) -> int | None:
    """The seed; None is drawn, and so is llama.cpp's -1."""
    seed = fields.integer("seed", -(1 << SEED_BITS), (1 << SEED_BITS) - 1)
    return None if seed == -1 else seed


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


def read_stop(fields: Fields, name: str) -> tuple[str, ...]:
    """The strings that end the text: one, or a list."""
    given = fields.get(name)
    stops = [given] if isinstance(given, str) else [] if given is None else given
    fits = isinstance(stops, list) and len(stops) <= MOST_STOPS
    if not fits or not all(isinstance(stop, str) and stop for stop in stops):
        raise fields.wrong(name, f"a string or a list of {MOST_STOPS} at most, none empty")
    return tuple(stops)
