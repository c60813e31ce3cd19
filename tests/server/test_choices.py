"""Several answers to one request: choices, prompts, echoes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from mlxcel.engine.engine import Settings
from mlxcel.engine.limits import Limits

Served = Callable[..., AbstractAsyncContextManager[Any]]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}


def text_of(choice: dict[str, Any]) -> str:
    """What a choice, or a chunk of one, says."""
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("message", choice.get("delta", {})).get("content", ""))


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_choices_in_their_order(served: Served, path: str) -> None:
    """n choices are n requests that differ in their choice alone; the usage adds them up."""
    async with served(["one", "two", "three"]) as client:
        status, body = await client.post(path, {**HI, "n": 3, "seed": 5})
        assert status == 200
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert [text_of(choice) for choice in body["choices"]] == ["one", "two", "three"]
        prompt = body["usage"]["prompt_tokens"]
        assert prompt == len(client.backend.requests[0].prompt)
        assert body["usage"]["completion_tokens"] == len("onetwothree")
        samplings = [request.sampling for request in client.backend.requests]
        assert [(s.seed, s.choice) for s in samplings] == [(5, 0), (5, 1), (5, 2)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_choices_in_a_stream(served: Served, path: str) -> None:
    """Chunks say which choice they are of, and each choice ends exactly once."""
    answers = ["short", "somewhat longer", ""]
    async with served(answers) as client:
        options = {"stream_options": {"include_usage": True}}
        *chunks, last = await client.chunks(path, {**HI, "n": 3, **options})
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        for index, answer in enumerate(answers):
            mine = [choice for choice in choices if choice["index"] == index]
            assert "".join(map(text_of, mine)) == answer
            reasons = [choice["finish_reason"] for choice in mine]
            assert reasons == [None] * (len(mine) - 1) + ["stop"]
        if path == CHAT:
            assert [c["index"] for c in choices if "role" in c["delta"]] == [0, 1, 2]
        assert last["usage"]["completion_tokens"] == len("".join(answers))


async def test_drawn_choices_differ(tiny_served: Served) -> None:
    """Choices are drawn apart, the first as it would be alone, and again the same."""
    body = {"prompt": "abc", "max_tokens": 12, "temperature": 1.5, "seed": 3}
    async with tiny_served() as client:
        alone = await client.text(**body)
        _, first = await client.complete(**body, n=4)
        _, second = await client.complete(**body, n=4)
        texts = [choice["text"] for choice in first["choices"]]
        assert texts[0] == alone[0]
        assert len(set(texts)) > 1
        assert texts == [choice["text"] for choice in second["choices"]]


async def test_lists_of_prompts(served: Served) -> None:
    """Every prompt gets its choices, prompt by prompt."""
    async with served(["a", "b", "c", "d"]) as client:
        _, body = await client.post(TEXT, {"prompt": ["x", "yy"], "n": 2})
        assert [choice["text"] for choice in body["choices"]] == ["a", "b", "c", "d"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == 3
        requests = client.backend.requests
        assert [bytes(r.prompt) for r in requests] == [b"x", b"x", b"yy", b"yy"]
        assert [r.sampling.choice for r in requests] == [0, 1, 0, 1]
        assert requests[0].sampling.seed == requests[1].sampling.seed
        assert requests[1].sampling.seed != requests[2].sampling.seed


async def test_prompts_of_one_seed(served: Served) -> None:
    """With a seed, each of several prompts is answered as it would be alone."""
    async with served() as client:
        await client.post(TEXT, {"prompt": ["x", "x"], "seed": 7})
        assert [r.sampling.seed for r in client.backend.requests] == [7, 7]


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105], [33]]])
async def test_token_ids(served: Served, prompt: list[Any]) -> None:
    """Token ids go to the model as they are."""
    async with served("ok") as client:
        status, body = await client.post(TEXT, {"prompt": prompt, "echo": True})
        assert status == 200
        lists = prompt if isinstance(prompt[0], list) else [prompt]
        assert [r.prompt for r in client.backend.requests] == [tuple(ids) for ids in lists]
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == [bytes(ids).decode() + "ok" for ids in lists]


@pytest.mark.parametrize(
    ("prompt", "code"),
    [([288], "invalid_value"), ([[]], "empty_prompt"), ([65] * 512, "context_length_exceeded")],
)
async def test_token_ids_that_cannot_be(served: Served, prompt: object, code: str) -> None:
    """Ids that the model does not know, none, or too many of them."""
    async with served() as client:
        status, body = await client.post(TEXT, {"prompt": prompt})
        assert (status, body["error"]["code"]) == (400, code)


@pytest.mark.parametrize("n", [1, 2])
async def test_an_echo(served: Served, n: int) -> None:
    """echo puts the prompt's text before each answer, whole or streamed."""
    async with served(" there") as client:
        _, body = await client.post(TEXT, {"prompt": "héllo", "echo": True, "n": n})
        assert [choice["text"] for choice in body["choices"]] == ["héllo there"] * n
        chunks = await client.chunks(TEXT, {"prompt": "héllo", "echo": True, "n": n})
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        for index in range(n):
            assert "".join(c["text"] for c in choices if c["index"] == index) == "héllo there"


async def test_refused_together(served: Served, eventually: Any) -> None:
    """Answers that do not all find room are refused together, and none of them runs."""
    async with served(settings=Settings(Limits(parallel=1), queue_depth=4)) as client:
        client.gate.close()
        first = asyncio.ensure_future(client.complete())
        await eventually(lambda: client.backend.active == 1)
        second = asyncio.ensure_future(client.complete(n=2))
        await eventually(lambda: client.backend.waiting == 2)
        status, body = await client.complete(n=3)
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert (client.backend.waiting, client.backend.cancelled) == (2, [])
        client.gate.release()
        assert [(await each)[0] for each in (first, second)] == [200, 200]


async def test_more_answers_than_there_can_be(served: Served) -> None:
    """What not even an idle server would take is no matter of trying again; limits are named."""
    async with served(settings=Settings(Limits(parallel=3), queue_depth=2)) as client:
        assert (await client.complete(n=3))[0] == 200
        status, body = await client.complete(n=4)
        assert (status, body["error"]["code"]) == (400, "request_too_large")
        assert body["error"]["param"] == "n" and "retryable" not in body["error"]
        for number in ("4 answers", "3 run at once", "2 may wait"):
            assert number in body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failure_is_the_whole_answers(served: Served, stream: bool) -> None:
    """A choice that fails before anything was sent gives its error; the others are cancelled."""
    async with served(["x" * 50] * 3) as client:
        client.gate.fail = ValueError("no such thing")
        status, body = await client.complete(n=3, stream=stream)
        assert (status, body["error"]["code"]) == (503, "stage_failed")
        client.gate.fail = None
        assert await client.text() == ("x" * 50, "stop")


async def test_all_are_cancelled_when_the_client_leaves(served: Served, eventually: Any) -> None:
    """Hanging up ends every choice."""
    async with served("x" * 400) as client:
        client.gate.close()
        client.gate.let(3)
        async with client.session.post(CHAT, json={**HI, "n": 3, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        client.gate.let(20)
        await eventually(lambda: len(client.backend.cancelled) == 3)
        client.gate.release()
        await eventually(lambda: client.backend.active == client.backend.waiting == 0)
