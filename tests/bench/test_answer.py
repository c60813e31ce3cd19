"""What is made of one streamed answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mlxcel.bench.answer import Answer, ask, kind_of
from mlxcel.checkpoint.config import read_config
from mlxcel.client.api import Waits, connect
from mlxcel.engine.tokenizer import Tokenizer, load_tokenizer
from mlxcel.errors import (
    DeadlineError,
    MlxcelError,
    ServerAnswerError,
    ServerRefusal,
    ServerUnreachable,
)

Asked = Callable[..., Answer]


def piece(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def used(**fields: Any) -> dict[str, Any]:
    return {"choices": [], "usage": fields}


@pytest.fixture
def asked(answering: Callable[[Any], str]) -> Asked:
    """Asks a server that answers with these chunks."""

    def run(*chunks: Any, status: int = 200, tokenizer: Tokenizer | None = None) -> Answer:
        data = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

        async def handler(request: web.BaseRequest) -> web.StreamResponse:
            return web.Response(text=data, status=status)

        async def ask_it() -> Answer:
            async with connect(answering(handler), None, Waits(total=60.0)) as api:
                return await ask(api, "/completions", {"max_tokens": 9}, tokenizer)

        return asyncio.run(ask_it())

    return run


def test_the_usage_counts(asked: Asked) -> None:
    """Tokens are those that the server counted, however many chunks there were."""
    details = {"cached_tokens": 3}
    usage = used(prompt_tokens=5, completion_tokens=9, prompt_tokens_details=details)
    answer = asked(piece("abc"), piece(""), piece("def", "length"), usage)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (5, 3, 9)
    assert len(answer.times) == 2
    assert (answer.estimated, answer.error) == (False, None)
    assert answer.began <= answer.times[0] <= answer.times[1] <= answer.ended


def test_chats(asked: Asked) -> None:
    """Content and thoughts are text; a role is none."""
    chunks = [delta(role="assistant"), delta(reasoning_content="hm"), delta(content="yes")]
    assert len(asked(*chunks).times) == 2


def test_without_usage(asked: Asked, tiny: Callable[..., Path]) -> None:
    """The length reached, else the tokenizer's count, else the chunks; marked as an estimate."""
    folder = tiny("llama")
    tokenizer = load_tokenizer(folder, read_config(folder))
    full = asked(piece("abc"), piece("de", "length"), tokenizer=tokenizer)
    counted = asked(piece("abc"), piece("de", "stop"), tokenizer=tokenizer)
    chunks = asked(piece("abc"), piece("de", "stop"))
    assert [a.output_tokens for a in (full, counted, chunks)] == [9, 5, 2]
    assert full.estimated and counted.estimated and chunks.estimated


@pytest.mark.parametrize(
    "chunk",
    [
        {},
        {"choices": None},
        {"choices": [None]},
        {"choices": [{"delta": 3, "text": 4}]},
        {"usage": 3},
        used(prompt_tokens="many", completion_tokens=-1, prompt_tokens_details=[]),
    ],
)
def test_odd_chunks(asked: Asked, chunk: Any) -> None:
    """Chunks of any shape are no text and no count."""
    answer = asked(chunk)
    assert (answer.times, answer.prompt_tokens, answer.output_tokens) == ((), 0, 0)
    assert answer.error is None and answer.estimated


def test_a_refusal(asked: Asked) -> None:
    """Its kind is told, and nothing else counts."""
    answer = asked(status=429)
    assert (answer.error, answer.output_tokens, answer.times) == ("status 429", 0, ())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ServerRefusal("u", 429, "Wait.", "queue_full"), "status 429 (queue_full)"),
        (ServerRefusal("u", 500, "Oh."), "status 500"),
        (ServerRefusal("u", None, "Oh.", "stage_lost"), "error amid the answer (stage_lost)"),
        (ServerRefusal("u", None, "Oh."), "error amid the answer (no code)"),
        (ServerUnreachable("u", "refused"), "no connection"),
        (DeadlineError("u", "it", 1.0, "Wait."), "too late"),
        (ServerAnswerError("u", "what"), "broken answer"),
    ],
)
def test_kinds(error: MlxcelError, kind: str) -> None:
    """Errors of one kind have one name, whatever their texts say."""
    assert kind_of(error) == kind
