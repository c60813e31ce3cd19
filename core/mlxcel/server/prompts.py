"""From a request's texts to token ids that the model can take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.server.errors import ApiError, invalid
from mlxcel.server.schema import Generation
from mlxcel.server.serving import Serving

LONG_TEXT = 1 << 20
"""Characters of a text that is tokenized piece by piece first, to see whether it can fit."""

PIECE = 1 << 18

LONGEST_COUNTED = 1 << 22
"""Characters of a text that is tokenized for its own sake."""

CUT_TOKENS = 64
"""Tokens more, at most, that cutting a text in two is taken to make of it."""


def encode(
    serving: Serving, text: str, param: str, *, add_special_tokens: bool = True
) -> list[int]:
    """The token ids of ``text``, which are not empty and leave the answer some room.

    What is far too long costs little: a text of megabytes takes many seconds, so it is given
    up as soon as its beginning fills the context.

    Raises:
        ApiError: There are no tokens, too many, or some that the model does not know.
    """
    tokenizer, size = serving.backend.tokenizer, serving.context_size
    if size is not None and len(text) > LONG_TEXT:
        _check_beginning(tokenizer, text, size, param)
    tokens = tokenizer.encode(text, add_special_tokens)
    check_length(serving, tokens, param)
    known = serving.backend.vocab_size
    if known is not None and max(tokens) >= known:
        text = f"The tokenizer made the id {max(tokens)}, but the model knows {known} tokens."
        raise ApiError(500, text, "wrong_tokenizer")
    return tokens


def count(serving: Serving, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    """The token ids of ``text``, which need not fit the context.

    Raises:
        ApiError: It would take too long.
    """
    if len(text) > LONGEST_COUNTED:
        text = f"'{param}' has {len(text)} characters, and {LONGEST_COUNTED} are counted at most."
        raise invalid(f"{text} Send it in parts.", param, "invalid_value")
    return serving.backend.tokenizer.encode(text, add_special_tokens)


def _check_beginning(tokenizer: Tokenizer, text: str, size: int, param: str) -> None:
    found = 0
    for cuts, start in enumerate(range(0, len(text), PIECE)):
        found += len(tokenizer.encode(text[start : start + PIECE], False))
        if found - cuts * CUT_TOKENS >= size:
            raise invalid(
                f"The prompt has {len(text)} characters, and its beginning alone has more tokens "
                f"than the context holds: {size}, prompt and answer together. Send a shorter "
                f"prompt.",
                param,
                "context_length_exceeded",
            )


def check_length(serving: Serving, tokens: Sequence[int], param: str) -> None:
    """Refuse a prompt that is empty or leaves no place for a token.

    Raises:
        ApiError: It is.
    """
    size = serving.context_size
    if not tokens:
        raise invalid(f"'{param}' is empty; give at least one character.", param, "empty_prompt")
    if size is not None and len(tokens) >= size:
        raise invalid(
            f"The prompt has {len(tokens)} tokens, and the context holds {size}, prompt and "
            f"answer together. Send a shorter prompt.",
            param,
            "context_length_exceeded",
        )


def check_ids(serving: Serving, tokens: Sequence[int], param: str) -> None:
    """Refuse ids of the client's that the model does not know.

    Raises:
        ApiError: There is one.
    """
    known = known_tokens(serving)
    if (highest := max(tokens, default=0)) >= known:
        text = f"'{param}' has the token {highest}, but the model knows {known}."
        raise invalid(text, param, "invalid_value")


def check_biases(serving: Serving, generation: Generation) -> None:
    """Refuse a bias of a token that the model does not know.

    Raises:
        ApiError: There is one.
    """
    known = known_tokens(serving)
    if (highest := max(generation.sampling.bias_tokens, default=0)) >= known:
        text = f"'logit_bias' names the token {highest}, but the model knows {known}."
        raise invalid(text, "logit_bias", "invalid_value")


def known_tokens(serving: Serving) -> int:
    """How many tokens the model knows: config.json says, or else the tokenizer."""
    size: Any = serving.backend.vocab_size or serving.backend.tokenizer.backend.get_vocab_size()
    return int(size)
