"""Text to token ids and back, over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import attrs
import pytest

from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.server import prompts
from mlxcel.testing.tiny.tokenizer import BOS

Served = Callable[..., AbstractAsyncContextManager[Any]]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("name", ["prompt", "content"])
async def test_there_and_back(served: Served, name: str) -> None:
    """A text's ids, their number, and the same text again."""
    async with served() as client:
        status, body = await client.post("/tokenize", {name: "héllo<|user|>"})
        assert status == 200
        assert body["tokens"][-1] >= 256
        assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 512)
        status, back = await client.post("/detokenize", {"tokens": body["tokens"]})
        assert (status, back) == (200, {"prompt": "héllo<|user|>", "content": "héllo<|user|>"})
        _, empty = await client.post("/tokenize", {name: ""})
        assert empty["tokens"] == []
        assert (await client.post("/detokenize", {"tokens": []}))[1]["content"] == ""


async def test_special_tokens(served: Served, tokenizer: Tokenizer) -> None:
    """They stand around a prompt unless it is told otherwise, and around content if it is."""
    using = attrs.evolve(tokenizer, affixes=((BOS,), ()))
    async with served(using=using) as client:
        for body, first in (
            ({"prompt": "a"}, BOS),
            ({"prompt": "a", "add_special_tokens": False}, 97),
            ({"content": "a"}, 97),
            ({"content": "a", "add_special": True}, BOS),
        ):
            assert (await client.post("/tokenize", body))[1]["tokens"][0] == first


async def test_messages(served: Served) -> None:
    """A conversation's ids are those that the chat API would send to the model."""
    async with served() as client:
        _, body = await client.post("/tokenize", {"messages": MESSAGES})
        await client.post("/v1/chat/completions", {"messages": MESSAGES})
        assert tuple(body["tokens"]) == client.backend.requests[0].prompt
        _, closed = await client.post(
            "/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}
        )
        assert closed["tokens"] == body["tokens"][:-1]
        tool = {"type": "function", "function": {"name": "f"}}
        _, told = await client.post("/tokenize", {"messages": MESSAGES, "tools": [tool]})
        assert told["count"] > body["count"]
        _, named = await client.post("/tokenize", {"prompt": "ab", "return_token_strs": True})
        assert named["token_strs"] == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, "with_pieces"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [288]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
async def test_what_cannot_be(served: Served, path: str, body: Any, param: str) -> None:
    """A body that says nothing, or too much, is refused by the field's name."""
    async with served() as client:
        status, answer = await client.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        status, _ = await client.post(path, {**body, "model": "gpt-4"})
        assert status == 404


async def test_a_text_without_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not fit is given up before all of it is tokenized."""
    monkeypatch.setattr(prompts, "LONG_TEXT", 1000)
    monkeypatch.setattr(prompts, "PIECE", 400)
    monkeypatch.setattr(prompts, "LONGEST_COUNTED", 5000)
    async with served(context=1500) as client:
        seen: list[int] = []
        encode = Tokenizer.encode

        def counting(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
            seen.append(len(text))
            return encode(self, text, add_special_tokens)

        monkeypatch.setattr(Tokenizer, "encode", counting)
        status, body = await client.complete("x" * 6000)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert " 6000 characters" in body["error"]["message"]
        assert sum(seen) <= 2000
        assert (await client.complete("x" * 1400, max_tokens=5))[0] == 200
        status, body = await client.post("/tokenize", {"prompt": "x" * 5001})
        assert (status, body["error"]["param"]) == (400, "prompt")
        assert (await client.post("/tokenize", {"prompt": "x" * 5000}))[1]["count"] == 5000
