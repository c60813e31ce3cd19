"""The objects that clients get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxcel.server.answers import Answer, ChatAnswer, TextAnswer, usage

MODEL = 'a "model" named ""'


def fields(data: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(data)
    assert value.pop("created") > 1e9
    assert value.pop("model") == MODEL
    return value


@pytest.mark.parametrize("text", ["a", '"quoted"\n', "日本 😀", "\\", '""'])
@pytest.mark.parametrize("make", [ChatAnswer, TextAnswer])
def test_a_piece_says_exactly_its_text(make: type[Answer], text: str) -> None:
    """Whatever the text, the chunk is JSON with that text in it."""
    [choice] = fields(make(MODEL).piece(text))["choices"]
    assert choice["finish_reason"] is None
    assert (choice["delta"]["content"] if make is ChatAnswer else choice["text"]) == text


def test_chat_chunks() -> None:
    """A chat begins with the role and ends with an empty delta."""
    answer = ChatAnswer(MODEL)
    [opening] = map(fields, answer.opening())
    kind = {"id": opening["id"], "object": "chat.completion.chunk"}
    delta = {"role": "assistant", "content": ""}
    assert opening == {**kind, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert fields(answer.last("stop")) == {**kind, "choices": [last]}
    used = usage(3, 4)
    assert used == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert fields(answer.used(used)) == {**kind, "choices": [], "usage": used}
    assert kind["id"].startswith("chatcmpl-")


def test_text_chunks() -> None:
    """A completion has no opening; its last chunk has no text."""
    answer = TextAnswer(MODEL)
    assert answer.opening() == []
    last = fields(answer.last("length"))
    assert last["object"] == "text_completion"
    assert last["choices"] == [{"index": 0, "text": "", "finish_reason": "length"}]
    assert answer.whole("abc", "stop", usage(1, 2))["choices"] == [
        {"index": 0, "text": "abc", "finish_reason": "stop"}
    ]


@pytest.mark.parametrize("make", [ChatAnswer, TextAnswer])
def test_ids_differ(make: type[Answer]) -> None:
    """Every answer has an id of its own."""
    assert len({fields(make(MODEL).last("stop"))["id"] for _ in range(8)}) == 8
