"""Loads: what is asked, and when."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from mlxcel.bench.load import Load, arrivals, bodies, run_load
from mlxcel.bench.prompts import Prompts
from mlxcel.client.api import Waits, connect

ANSWER = 'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'


def drawn(load: Load, seed: str = "1") -> list[dict[str, Any]]:
    return bodies(load, Prompts(seed), "m", seed)


def test_bodies() -> None:
    """Each request streams, wants its usage, and bans the end tokens."""
    [body] = drawn(Load(requests=1, prompt=(3, 3), output=(4, 4), end_tokens=(7,)))
    assert len(body.pop("prompt").split()) == 3
    assert body == {
        "model": "m",
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "logit_bias": {"7": -100},
    }


def test_ends_may_be_kept() -> None:
    """Then nothing is said about them."""
    [body] = drawn(Load(requests=1, ignore_end=False, end_tokens=(7,)))
    assert not {"ignore_eos", "logit_bias"} & body.keys()


def test_chats() -> None:
    """A chat's prompt is a user's message."""
    [body] = drawn(Load(requests=1, prompt=(3, 3), endpoint="chat"))
    [message] = body["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 3
    assert "prompt" not in body


def test_lengths_are_drawn() -> None:
    """All lengths of the range come, and no others; the same seed draws the same."""
    load = Load(requests=200, prompt=(2, 4), output=(5, 7))
    made = drawn(load)
    assert {len(body["prompt"].split()) for body in made} == {2, 3, 4}
    assert {body["max_tokens"] for body in made} == {5, 6, 7}
    assert made == drawn(load) != drawn(load, "2")


def test_arrivals() -> None:
    """At once without a rate; else one after another with the wanted mean gap."""
    assert arrivals(Load(requests=3), "1") == [0.0, 0.0, 0.0]
    times = arrivals(Load(requests=10_000, rate=20.0), "1")
    assert times[0] == 0.0 and times == sorted(times)
    assert math.isclose(times[-1] / 9999, 1 / 20, rel_tol=0.05)


def run(url: str, load: Load, on_answer: Callable[[], None] = lambda: None) -> Any:
    async def loaded() -> Any:
        async with connect(url, None, Waits(total=60.0)) as api:
            times = arrivals(load, "1")
            return await run_load(api, load, drawn(load), times, on_answer=on_answer)

    return asyncio.run(loaded())


def test_clients_side_by_side(answering: Callable[[Any], str]) -> None:
    """As many at once as there are clients, never more, and everybody is answered."""
    current, most, answered = 0, 0, 0
    full = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal current, most
        current += 1
        most = max(most, current)
        if current == 3:
            full.set()
        await full.wait()  # nobody leaves before three have come
        current -= 1
        return web.Response(text=ANSWER)

    def on_answer() -> None:
        nonlocal answered
        answered += 1

    done = run(answering(handler), Load(requests=20, clients=3), on_answer)
    assert (most, answered, len(done.answers)) == (3, 20, 20)
    assert all(answer.error is None for answer in done.answers)
    assert done.seconds >= max(answer.ended - answer.began for answer in done.answers)


def test_prompts_are_distinct(answering: Callable[[Any], str]) -> None:
    """No cache can help: every request brings a prompt of its own."""
    seen = []

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(json.loads(await request.read())["prompt"])
        return web.Response(text=ANSWER)

    run(answering(handler), Load(requests=20))
    assert len(set(seen)) == 20


def test_a_server_that_dies(answering: Callable[[Any], str]) -> None:
    """What it does not answer any more is an error each, and the run ends."""
    left = 5

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal left
        left -= 1
        if left < 0:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(text=ANSWER)

    done = run(answering(handler), Load(requests=12, clients=4))
    errors = [answer.error for answer in done.answers]
    assert (errors.count(None), errors.count("broken answer")) == (5, 7)


@pytest.mark.parametrize("rate", [math.inf, 1000.0])
def test_nobody_there(rate: float) -> None:
    """Every request fails by itself, whenever it comes."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    done = run(f"http://127.0.0.1:{port}", Load(requests=5, rate=rate))
    assert {answer.error for answer in done.answers} == {"no connection"}
