"""Answers in a given form, and log-probabilities, of a tiny model."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

Served = Callable[..., AbstractAsyncContextManager[Any]]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 64}
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"type": "string", "enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["color", "count"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def fits(text: str) -> bool:
    value = json.loads(text)
    return value["color"] in ("red", "green") and 0 <= value["count"] <= 99 and len(value) == 2


async def test_a_schema_holds(tiny_served: Served) -> None:
    """Every API and way of drawing gives JSON of the schema, and plain requests run beside."""
    async with tiny_served() as client:
        warm = {**HI, "temperature": 1.5, "seed": 4, "response_format": FORM}
        alone = await client.text()
        chat, text, chunks, plain = await asyncio.gather(
            client.post(CHAT, {**warm, "n": 3}),
            client.post(TEXT, warm),
            client.chunks(CHAT, warm),
            client.text(),
        )
        made = [choice["message"]["content"] for choice in chat[1]["choices"]]
        assert all(map(fits, [*made, text[1]["choices"][0]["text"]]))
        assert all(c["finish_reason"] == "stop" for c in chat[1]["choices"])
        assert plain == alone
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content", "") for delta in deltas) == made[0]


async def test_a_schema_that_means_nothing(served: Served) -> None:
    """A schema that cannot be used is refused before anything runs."""
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    async with served() as client:
        for path in (CHAT, TEXT):
            status, body = await client.post(path, {**HI, "response_format": form})
            assert (status, body["error"]["code"]) == (400, "unsupported_schema")
            assert body["error"]["param"] == "response_format"
        assert client.backend.requests == []


async def test_log_probabilities_in_a_chat(tiny_served: Served) -> None:
    """There is an item for each token, whole and streamed alike; the likeliest comes first."""
    async with tiny_served() as client:
        asked = {**HI, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
        _, whole = await client.post(CHAT, asked)
        [choice] = whole["choices"]
        items = choice["logprobs"]["content"]
        assert len(items) == whole["usage"]["completion_tokens"] == 6
        for item in items:
            tops = item["top_logprobs"]
            assert len(tops) == 3
            assert [t["logprob"] for t in tops] == sorted(
                (t["logprob"] for t in tops), reverse=True
            )
            assert item["logprob"] == tops[0]["logprob"] <= 0  # greedy
            assert bytes(item["bytes"]).decode(errors="replace") == item["token"]
        chunks = await client.chunks(CHAT, asked)
        found = [c["logprobs"]["content"] for x in chunks for c in x["choices"] if "logprobs" in c]
        assert [item for content in found for item in content] == items
        _, plain = await client.post(CHAT, {**asked, "top_logprobs": None})
        assert all(i["top_logprobs"] == [] for i in plain["choices"][0]["logprobs"]["content"])


@pytest.mark.parametrize("count", [0, 2])
async def test_log_probabilities_of_a_text(tiny_served: Served, count: int) -> None:
    """The older API's four lists are as long as the text has tokens, whole and streamed."""
    async with tiny_served() as client:
        asked = {**HI, "max_tokens": 6, "logprobs": count}
        _, whole = await client.post(TEXT, asked)
        found = whole["choices"][0]["logprobs"]
        assert {len(values) for values in found.values()} == {6}
        for value, tops in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
            assert 1 <= len(tops) <= count + 1
            assert math.isclose(value, max(tops.values()))
        chunks = await client.chunks(TEXT, asked)
        pieces = [c["logprobs"] for x in chunks for c in x["choices"] if "logprobs" in c]
        for name, values in found.items():
            assert [value for piece in pieces for value in piece[name]] == values


async def test_end_tokens_may_end_nothing(served: Served) -> None:
    """With ignore_eos a text is as long as it was asked to be."""
    async with served("ab") as client:
        _, body = await client.complete(max_tokens=9, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == 9
        assert body["choices"][0]["finish_reason"] == "length"
