"""Log-probabilities as OpenAI's two APIs spell them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxcel.engine.detokenizer import StreamingDetokenizer
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.pipeline.step import Logprobs

Drawn = tuple[int, Logprobs]
"""A token and its log-probabilities."""


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes that a token adds to a text; none for an id that the tokenizer lacks."""
    return tokenizer.token_bytes(token_id) or b""


def chat_logprobs(tokenizer: Tokenizer, drawn: Sequence[Drawn]) -> list[dict[str, Any]]:
    """The items of ``logprobs.content`` in an answer of the chat API."""
    return [
        {
            **_chat_entry(tokenizer, token, found.drawn),
            "top_logprobs": [
                _chat_entry(tokenizer, likely, value)
                for likely, value in zip(found.ids, found.values, strict=True)
            ],
        }
        for token, found in drawn
    ]


def _chat_entry(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    data = token_bytes(tokenizer, token)
    return {"token": data.decode(errors="replace"), "logprob": value, "bytes": list(data)}


class TextLogprobs:
    """The ``logprobs`` of one choice of the older API, piece by piece.

    Args:
        tokenizer: Of the model.
        offset: Characters of the answer's text before the first token, which an echo has.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamingDetokenizer(tokenizer)
        self._offset = offset

    def take(self, drawn: Sequence[Drawn]) -> dict[str, Any]:
        """What the next tokens add.

        ``top_logprobs`` has the drawn token beside the likeliest. An offset is the place in
        the text of the first character that the token takes part in.
        """
        spelled = {token: self._spell(token) for token, _ in drawn}
        offsets = []
        for token, _ in drawn:
            offsets.append(self._offset)
            self._offset += len(self._decoder.add(token))
        return {
            "tokens": [spelled[token] for token, _ in drawn],
            "token_logprobs": [found.drawn for _, found in drawn],
            "top_logprobs": [self._likeliest(spelled[token], found) for token, found in drawn],
            "text_offset": offsets,
        }

    def _likeliest(self, drawn: str, found: Logprobs) -> dict[str, float]:
        values: dict[str, float] = {}
        for token, value in zip(found.ids, found.values, strict=True):
            values.setdefault(self._spell(token), value)  # two may spell the same half character
        values.setdefault(drawn, found.drawn)
        return values

    def _spell(self, token: int) -> str:
        return token_bytes(self._tokenizer, token).decode(errors="replace")
