"""A load on a server: who asks what, when."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs

from mlxcel.bench.answer import Answer, ask
from mlxcel.bench.prompts import Prompts
from mlxcel.client.api import Api
from mlxcel.engine.tokenizer import Tokenizer

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}

Body = dict[str, Any]
Lengths = tuple[int, int]
"""The least and the most tokens."""


@attrs.frozen
class Load:
    """What is asked of a server.

    Attributes:
        requests: How many there are.
        clients: How many are under way at most; None is no limit.
        rate: Requests a second, as a Poisson process; infinite is all of them at once.
        prompt, output: How long prompts and answers are, drawn evenly.
        endpoint: Whether they are chats or texts.
        ignore_end: Whether end tokens are to be ignored, so that lengths are exact.
        end_tokens: The end tokens, for servers to which they must be named.
    """

    requests: int = 32
    clients: int | None = 8
    rate: float = math.inf
    prompt: Lengths = (64, 64)
    output: Lengths = (16, 16)
    endpoint: Endpoint = "completions"
    ignore_end: bool = True
    end_tokens: tuple[int, ...] = ()


@attrs.frozen
class Run:
    """The answers of one load, and the seconds from its first request to its last answer."""

    answers: tuple[Answer, ...]
    seconds: float


def bodies(load: Load, prompts: Prompts, model: str | None, seed: str) -> list[Body]:
    """The requests of a load; the same seed draws the same lengths."""
    lengths = random.Random(f"{seed} lengths")
    made = []
    for _ in range(load.requests):
        text = prompts.draw(lengths.randint(*load.prompt))
        made.append(make_body(load, text, lengths.randint(*load.output), model))
    return made


def arrivals(load: Load, seed: str) -> list[float]:
    """When each request arrives, in seconds from the beginning."""
    if math.isinf(load.rate):
        return [0.0] * load.requests
    gaps = random.Random(f"{seed} arrivals")
    return list(
        itertools.accumulate(
            (gaps.expovariate(load.rate) for _ in range(load.requests - 1)), initial=0.0
        )
    )


async def run_load(
    api: Api,
    load: Load,
    requests: Sequence[Body],
    times: Sequence[float],
    *,
    tokenizer: Tokenizer | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> Run:
    """Send each of ``requests`` at its time, or when a client is free after that.

    A request's own time begins when it is sent: waiting for a client is no part of it.
    """
    path = PATHS[load.endpoint]
    free = asyncio.Semaphore(load.clients or len(requests))
    began = time.perf_counter()

    async def send(body: Body, at: float) -> Answer:
        await asyncio.sleep(began + at - time.perf_counter())
        async with free:
            answer = await ask(api, path, body, tokenizer)
        on_answer()
        return answer

    answers = await asyncio.gather(*map(send, requests, times))
    return Run(tuple(answers), time.perf_counter() - began)


def make_body(load: Load, text: str, tokens: int, model: str | None) -> Body:
    """A request that streams, with its usage at the end, greedy."""
    chat = load.endpoint == "chat"
    body: Body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body |= {
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if model is not None:
        body["model"] = model
    if load.ignore_end:
        body["ignore_eos"] = True
        if load.end_tokens:
            body["logit_bias"] = {str(token): -100 for token in load.end_tokens}
    return body
