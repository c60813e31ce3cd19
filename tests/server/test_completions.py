"""Chats and completions over HTTP, with scripted stages."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import attrs
import pytest

from mlxcel.engine.chat_template import ChatTemplate
from mlxcel.engine.engine import Settings
from mlxcel.engine.kv_manager import StageKVManager
from mlxcel.engine.limits import Limits
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.family.caches import KVCacheKind
from mlxcel.server import chat, completions

Served = Callable[..., AbstractAsyncContextManager[Any]]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def content(chunks: list[Any]) -> list[str]:
    """The texts of a chat's chunks."""
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return [delta["content"] for delta in deltas if "content" in delta]


async def test_a_whole_chat(served: Served) -> None:
    """A chat answers with one message, a finish reason and the usage."""
    async with served("hello") as client:
        status, body = await client.chat()
        assert status == 200
        message = {"role": "assistant", "content": "hello"}
        assert body["choices"] == [{"index": 0, "message": message, "finish_reason": "stop"}]
        assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11}
        assert (body["object"], body["model"]) == ("chat.completion", "tiny")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("limit", "reason"), [(3, "length"), (9, "stop")])
async def test_one_terminal_chunk(served: Served, path: str, limit: int, reason: str) -> None:
    """A stream has exactly one chunk with a finish reason, and nothing but [DONE] after it."""
    async with served("hello") as client:
        chunks = await client.chunks(path, {**HI, "prompt": "hi", "max_tokens": limit})
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert reasons == [None] * (len(chunks) - 1) + [reason]
        assert all("usage" not in chunk for chunk in chunks)
        assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_usage_when_asked_for(served: Served, path: str) -> None:
    """include_usage adds one chunk without choices; no other chunk has a usage."""
    async with served("hello") as client:
        options = {"stream_options": {"include_usage": True}}
        *chunks, last = await client.chunks(path, {**HI, "prompt": "hi", **options})
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 5
        assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("text", ["日本語のテキスト", "👩‍👩‍👧 family 😀!", "naïve", "ascii"])
async def test_never_half_a_character(served: Served, text: str) -> None:
    """Characters of several tokens come whole, one by one."""
    async with served(text) as client:
        pieces = content(await client.chunks(CHAT, HI))
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)
        assert await client.text() == (text, "stop")


@pytest.mark.parametrize("limit", range(1, 8))
async def test_cut_inside_a_character(served: Served, limit: int) -> None:
    """max_tokens inside a character: what is whole comes as it is, the rest as one U+FFFD."""
    async with served("日本") as client:
        whole = "日本".encode()[:limit].decode(errors="ignore")
        cut = limit < 6 and limit % 3 != 0
        reason = "length" if limit <= 6 else "stop"
        assert await client.text(max_tokens=limit) == (whole + "\ufffd" * cut, reason)
        chunks = await client.chunks(CHAT, {**HI, "max_tokens": limit})
        assert "".join(content(chunks)) == whole + "\ufffd" * cut


@pytest.mark.parametrize(
    ("answer", "stop", "shown"),
    [
        ("the quick brown fox jumps", "own fox", "the quick br"),
        ("alpha beta gamma delta", ["beta gamma"], "alpha "),
        ("alpha beta gamma delta", ["gamma delta", "a g"], "alpha bet"),
        ("one two three", ["three four", "two"], "one "),
        ("one two", ["twofold"], "one two"),
        ("日本語です", "語", "日本"),
        ("stop", "stop", ""),
    ],
)
async def test_stop_strings_never_leak(
    served: Served, answer: str, stop: object, shown: str
) -> None:
    """No part of a stop string is shown, whatever tokens it spans; what only looks like one is."""
    async with served(answer) as client:
        assert await client.text(stop=stop) == (shown, "stop")
        pieces = content(await client.chunks(CHAT, {**HI, "stop": stop}))
        assert "".join(pieces) == shown


async def test_a_prompt_of_one_token(served: Served) -> None:
    """The shortest prompt is answered."""
    async with served("ok") as client:
        _, body = await client.complete("a")
        assert body["usage"]["prompt_tokens"] == 1
        assert body["choices"][0]["text"] == "ok"


async def test_an_empty_prompt_is_refused(served: Served) -> None:
    """A prompt without a token cannot be continued."""
    async with served() as client:
        status, body = await client.complete("")
        assert (status, body["error"]["code"]) == (400, "empty_prompt")


@pytest.mark.parametrize("length", [40, 41, 60_000])
async def test_over_the_context(served: Served, length: int) -> None:
    """A prompt that leaves no place for a token is refused with both numbers."""
    async with served(context=40) as client:
        status, body = await client.complete("x" * length)
        assert status == 400
        assert f" {length} tokens" in body["error"]["message"]
        assert " 40, " in body["error"]["message"]
        assert body["error"]["code"] == "context_length_exceeded"


async def test_tokens_are_cut_to_what_the_context_has_left(served: Served) -> None:
    """A shorter prompt gets as many tokens as there is room for."""
    async with served("x" * 100, context=40) as client:
        assert await client.text("y" * 35) == ("x" * 5, "length")
        assert client.backend.requests[-1].max_tokens == 5


async def test_the_operators_context_goes_first(served: Served) -> None:
    """--ctx-size bounds what the model itself would allow."""
    async with served(context=512, context_size=10) as client:
        assert (await client.complete("x" * 10))[0] == 400


async def test_a_template_that_refuses(served: Served, tokenizer: Tokenizer) -> None:
    """What the template says reaches the client, as its own fault."""
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system role!') }}{% endif %}x"
    )
    strict = attrs.evolve(tokenizer, template=ChatTemplate(source, Path("secret/path")))
    async with served(using=strict) as client:
        messages = [{"role": "system", "content": "be good"}, *HI["messages"]]
        for stream in (False, True):
            status, body = await client.post(CHAT, {"messages": messages, "stream": stream})
            assert status == 400
            assert "No system role!" in body["error"]["message"]
            assert "secret" not in json.dumps(body)
        assert (await client.chat())[0] == 200


async def test_a_template_that_fails(served: Served, tokenizer: Tokenizer) -> None:
    """A template that these messages break is told without the server's paths."""
    source = "{{ messages[0].content + messages[0].tool }}"
    strict = attrs.evolve(tokenizer, template=ChatTemplate(source, Path("secret/path")))
    async with served(using=strict) as client:
        status, body = await client.chat()
        assert (status, body["error"]["code"]) == (400, "chat_template_error")
        assert "secret" not in json.dumps(body)


async def test_without_a_template(served: Served, tokenizer: Tokenizer) -> None:
    """A model without a chat template completes text, and says so to who wants to chat."""
    async with served(using=attrs.evolve(tokenizer, template=None)) as client:
        status, body = await client.chat()
        assert (status, body["error"]["code"]) == (400, "no_chat_template")
        assert await client.text() == ("hello", "stop")


async def test_forms_of_content(served: Served) -> None:
    """Text parts are one text, and an assistant that only called tools has none."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for silent in ({"content": None}, {}):
        messages = [
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
            {"role": "assistant", "tool_calls": [call], **silent},
            {"role": "tool", "tool_call_id": "1", "content": "c"},
        ]
        async with served() as client:
            status, _ = await client.post(CHAT, {"messages": messages})
            assert status == 200
            prompt = client.backend.tokenizer.decode(
                client.backend.requests[0].prompt, skip_special_tokens=False
            )
            turns = "<|user|>ab<|eos|><|assistant|><|eos|><|tool|>c<|eos|><|assistant|>"
            assert prompt == f"<|bos|>{turns}"


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b'{"messages": {}}', b'{"messages": [{"role"', b"[]", b'{"messages": 5}', b"\xff"],
)
async def test_bodies_that_are_wrong(served: Served, data: bytes) -> None:
    """Truncated, empty or wrongly typed JSON is the client's fault, in OpenAI's form."""
    async with served() as client:
        for path in (CHAT, TEXT):
            status, body = await client.post(path, data)
            assert status == 400
            assert body["error"]["type"] == "invalid_request_error"
            assert set(body["error"]) == {"message", "type", "param", "code"}


async def test_half_surrogates_do_no_harm(served: Served) -> None:
    """What JSON can spell and UTF-8 cannot is answered all the same."""
    async with served() as client:
        data = rb'{"prompt": "a\ud800b", "stop": ["\udc00"], "user": "\ud800"}'
        assert (await client.post(TEXT, data))[0] == 200
        assert (await client.post(TEXT, rb'{"prompt": "a", "model": "\ud800"}'))[0] == 404


async def test_a_bias_beyond_the_vocabulary(served: Served) -> None:
    """A token id that the model does not have cannot be biased."""
    async with served() as client:
        status, body = await client.complete(logit_bias={"288": 1})
        assert (status, body["error"]["param"]) == (400, "logit_bias")
        assert (await client.complete(logit_bias={"287": 1}))[0] == 200


async def test_sampling_reaches_the_stages(served: Served) -> None:
    """What the request says about drawing is what the engine is asked."""
    async with served() as client:
        await client.complete(temperature=0.5, seed=7, top_k=3, stop="x")
        [request] = client.backend.requests
        assert (request.sampling.temperature, request.sampling.seed) == (0.5, 7)
        assert (request.sampling.top_k, request.stop) == (3, ("x",))


async def test_many_at_once(served: Served) -> None:
    """64 streams at once: each gets all of its own text, once."""
    text = "all of this, in full"
    async with served(text) as client:
        chats = [client.chunks(CHAT, HI) for _ in range(64)]
        for chunks in await asyncio.gather(*chats):
            assert "".join(content(chunks)) == text
        assert client.backend.active == client.backend.waiting == 0


# What cannot be done now, or ever.


async def test_queue_full(served: Served, eventually: Any) -> None:
    """Who comes when the queue is full gets 429 and when to come again."""
    settings = Settings(Limits(parallel=1), queue_depth=1)
    async with served(settings=settings) as client:
        client.gate.close()
        first = asyncio.ensure_future(client.chat())
        await eventually(lambda: client.backend.active == 1)
        second = asyncio.ensure_future(client.chat())
        await eventually(lambda: client.backend.waiting == 1)
        async with client.session.post(CHAT, json=HI) as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"]) == (429, "rate_limit_error")
            assert int(response.headers["Retry-After"]) >= 1
            assert error["retryable"] is True
        client.gate.release()
        assert [(await task)[0] for task in (first, second)] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_place_in_time(served: Served, eventually: Any, stream: bool) -> None:
    """Who has waited too long gets 503, also where a stream was asked for."""
    settings = Settings(Limits(parallel=1), queue_timeout=0.05)
    async with served(settings=settings) as client:
        client.gate.close()
        first = asyncio.ensure_future(client.chat())
        await eventually(lambda: client.backend.active == 1)
        async with client.session.post(CHAT, json={**HI, "stream": stream}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "unavailable"
        client.gate.release()
        assert (await first)[0] == 200


async def test_what_never_fits(served: Served) -> None:
    """A request beyond a stage's whole budget is refused with the stage's numbers."""
    managers = [StageKVManager(0, [KVCacheKind(2, 32, 32)], 20_000, itemsize=4, chunk=512)]
    async with served(managers=managers, context=None) as client:
        status, body = await client.complete(max_tokens=100_000)
        assert (status, body["error"]["code"]) == (400, "request_too_large")
        assert "stage 0" in body["error"]["message"]
        assert "20000 bytes" in body["error"]["message"]
        assert managers[0].used == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_loading(served: Served, stream: bool) -> None:
    """Before the model is ready, requests get 503 and when to come again."""
    async with served() as client:
        client.backend.phase = "loading"
        async with client.session.post(CHAT, json={**HI, "stream": stream}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "2"


async def test_a_stage_that_fails_before_the_first_token(served: Served) -> None:
    """A stream that never began is a plain error with a status."""
    async with served() as client:
        client.gate.fail = ValueError("no such thing")
        for stream in (False, True):
            status, body = await client.chat(stream=stream)
            assert (status, body["error"]["code"]) == (503, "stage_failed")
            assert body["error"]["retryable"] is True


async def test_a_stage_that_fails_mid_stream(served: Served) -> None:
    """A stream that breaks ends with a typed, retryable error, and without [DONE]."""
    async with served("hello") as client:
        client.gate.close()
        client.gate.let(4)  # two for the prompt, two for its second and third token
        async with client.session.post(TEXT, json={"prompt": "ab", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            client.gate.fail = ValueError("no such thing")
            client.gate.release()
            events = (await response.read()).decode().strip().split("\n\n")
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["retryable"]) == ("stage_failed", True)
        assert "Traceback" not in error["message"]
        assert not any('"finish_reason":"' in event for event in events)


async def test_shutting_down(served: Served, eventually: Any) -> None:
    """Running streams end with a typed error when time is over; new requests get 503."""
    async with served() as client:
        client.gate.close()
        client.gate.let(2)
        async with client.session.post(TEXT, json={"prompt": "ab", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            drained = asyncio.to_thread(client.backend.stop, drain=60.0)
            stop = asyncio.ensure_future(drained)
            await eventually(lambda: client.backend.phase == "draining")
            assert (await client.chat())[0] == 503
            await asyncio.to_thread(client.backend.engine.stop)
            await stop
            last = (await response.read()).decode().strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_schemas_hold_nobody_up(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small a body with a schema is, a thread works on it: it may take a second."""
    threads: list[str] = []

    def grammar_of(schema: object, param: str) -> None:
        threads.append(threading.current_thread().name)

    for module in (chat, completions):
        monkeypatch.setattr(module, "grammar_of", grammar_of)
    async with served() as client:
        body = {**HI, "prompt": "a", "response_format": {"type": "json_object"}}
        assert (await client.post(path, body))[0] == 200
    assert [name.startswith("mlxcel-body") for name in threads] == [True]


async def test_a_bug_is_500_without_a_traceback(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """What nobody foresaw is in the log, and not in the answer."""
    async with served() as client:

        def broken(request: object) -> None:
            raise ZeroDivisionError("secret detail")

        client.backend.submit_all = broken
        status, body = await client.chat()
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "secret detail" not in json.dumps(body)
        assert "secret detail" in caplog.text


async def test_keep_alive_comments(served: Served) -> None:
    """A stream that has nothing to say for long shows that it lives."""
    async with served("ok", keep_alive=0.01) as client:
        client.gate.close()
        async with client.session.post(CHAT, json={**HI, "stream": True}) as response:
            for _ in range(3):
                assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            client.gate.release()
            *data, done = (await response.read()).decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        chunks = [json.loads(line[6:]) for line in data if line.startswith("data: ")]
        assert "".join(content(chunks)) == "ok"


async def test_an_error_after_a_comment_is_a_chunk(served: Served) -> None:
    """Once a comment has gone out, a failure comes as an event."""
    async with served(keep_alive=0.01) as client:
        client.gate.close()
        async with client.session.post(CHAT, json={**HI, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            client.gate.fail = ValueError("no such thing")
            client.gate.release()
            events = (await response.read()).decode().strip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "stage_failed"
