"""From a request to token ids that the model can take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs

from mlxcel.server.errors import ApiError, invalid
from mlxcel.server.schema import ChatRequest, CompletionRequest, Generation
from mlxcel.server.serving import Serving

SMALL_BODY = 4096
"""Bytes of a body that is worked on in the event loop; larger ones go to a thread."""

T = TypeVar("T")


async def work(size: int, function: Callable[[], T]) -> T:
    """``function()``, in a thread if the body it works on has many bytes."""
    return function() if size <= SMALL_BODY else await asyncio.to_thread(function)


def chat_tokens(serving: Serving, body: ChatRequest) -> list[int]:
    """The messages through the model's template.

    Raises:
        ApiError: The model has no template, or the request does not fit the model.
        ChatTemplateError: The template refuses the messages, or fails.
    """
    tokenizer = serving.backend.tokenizer
    if not tokenizer.has_chat_template:
        text = "This model has no chat template. Send the prompt as text to /v1/completions."
        raise invalid(text, "messages", "no_chat_template")
    return _checked(serving, tokenizer.encode_chat(body.messages), body.generation, "messages")


def completion_tokens(serving: Serving, body: CompletionRequest) -> list[int]:
    """The prompt as it is.

    Raises:
        ApiError: The request does not fit the model.
    """
    tokens = serving.backend.tokenizer.encode(body.prompt)
    return _checked(serving, tokens, body.generation, "prompt")


def within_context(serving: Serving, prompt: Sequence[int], generation: Generation) -> Generation:
    """``generation`` with no more tokens than the context has left."""
    if serving.context_size is None:
        return generation
    left = serving.context_size - len(prompt)
    return attrs.evolve(generation, max_tokens=min(generation.max_tokens, left))


def _checked(serving: Serving, tokens: list[int], generation: Generation, param: str) -> list[int]:
    size, known = serving.context_size, serving.backend.vocab_size
    if not tokens:
        raise invalid(f"'{param}' is empty; give at least one character.", param, "empty_prompt")
    if size is not None and len(tokens) >= size:
        raise invalid(
            f"The prompt has {len(tokens)} tokens, and the context holds {size}, prompt and "
            f"answer together. Send a shorter prompt.",
            param,
            "context_length_exceeded",
        )
    if known is not None:
        if max(tokens) >= known:
            text = f"The tokenizer made the id {max(tokens)}, but the model knows {known} tokens."
            raise ApiError(500, text, "wrong_tokenizer")
        if (highest := max(generation.sampling.bias_tokens, default=0)) >= known:
            text = f"'logit_bias' names the token {highest}, but the model knows {known}."
            raise invalid(text, "logit_bias", "invalid_value")
    return tokens
