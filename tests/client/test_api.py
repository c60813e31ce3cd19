"""The client of OpenAI's API against servers that answer in all ways."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from mlxcel.client.api import Waits, base_url, connect
from mlxcel.errors import (
    DeadlineError,
    MlxcelError,
    ServerAnswerError,
    ServerRefusal,
    ServerUnreachable,
    UsageError,
)

Answering = Callable[[Any], str]
WAITS = Waits(total=60.0)


def stream(url: str, key: str | None = None, waits: Waits = WAITS) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""

    async def collect() -> list[dict[str, Any]]:
        async with connect(f"{url}/v1", key, waits) as api:
            return [chunk async for chunk in api.stream("/completions", {"stream": True})]

    return asyncio.run(collect())


def models(url: str) -> list[str]:
    async def listed() -> list[str]:
        async with connect(f"{url}/v1", None, WAITS) as api:
            return await api.models()

    return asyncio.run(listed())


def body(data: bytes | str, status: int = 200, **headers: str) -> Any:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        return web.Response(body=data, status=status, headers=headers)

    return handler


def test_a_stream(answering: Answering) -> None:
    """Chunks come in order up to [DONE]; what follows that is not read."""
    data = 'data: {"a": 1}\n\n: hello\n\ndata: {"b": 2}\n\ndata: [DONE]\n\ndata: {"c": 3}\n\n'
    assert stream(answering(body(data))) == [{"a": 1}, {"b": 2}]


def test_a_long_line(answering: Answering) -> None:
    """A chunk of a megabyte is a chunk like others."""
    data = 'data: {"a": "' + "x" * (1 << 20) + '"}\n\ndata: [DONE]\n\n'
    assert len(stream(answering(body(data)))[0]["a"]) == 1 << 20


def test_the_key_is_sent(answering: Answering) -> None:
    """As a bearer token, and only where there is one."""
    seen = []

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return web.Response(text="data: [DONE]\n\n")

    url = answering(handler)
    stream(url)
    stream(url, "s3cret")
    assert seen == [None, "Bearer s3cret"]


@pytest.mark.parametrize(
    ("status", "data", "headers", "expected"),
    [
        (
            429,
            '{"error": {"message": "Two wait.", "code": "queue_full"}}',
            {"Retry-After": "3"},
            "answered with status 429: Two wait. Try again in 3 s.",
        ),
        (
            503,
            '{"error": {"message": "It loads. Try again in 2 s.", "code": null}}',
            {"Retry-After": "2"},
            "answered with status 503: It loads. Try again in 2 s.",
        ),
        (503, "busy", {}, "answered with status 503: busy. Try again later."),
        (
            401,
            '{"error": {"message": "A key is needed."}}',
            {},
            "answered with status 401: A key is needed. Give the right key with --api-key.",
        ),
        (400, '{"error": "No such field"}', {}, "answered with status 400: No such field."),
        (422, '{"detail": "Unprocessable"}', {}, "answered with status 422: Unprocessable."),
        (500, "", {}, "answered with status 500: Internal Server Error."),
        (404, "<html>nothing</html>", {}, "answered with status 404: <html>nothing</html>."),
    ],
)
def test_refusals(
    answering: Answering, status: int, data: str, headers: dict[str, str], expected: str
) -> None:
    """A refusal says in the server's words what happened, and when to try again."""
    with pytest.raises(ServerRefusal) as caught:
        stream(answering(body(data, status, **headers)))
    assert str(caught.value).endswith(expected)
    assert caught.value.status == status


def test_an_error_amid_the_answer(answering: Answering) -> None:
    """What came before it is delivered, then it is raised."""
    data = 'data: {"a": 1}\n\ndata: {"error": {"message": "Lost.", "code": "stage_lost"}}\n\n'
    with pytest.raises(ServerRefusal, match=r"an error amid the answer: Lost\.") as caught:
        stream(answering(body(data)))
    assert (caught.value.status, caught.value.code) == (None, "stage_lost")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ('data: {"a": 1}\n\n', "ended before it was finished"),
        ("", "ended before it was finished"),
        ("data: nonsense\n\n", "no JSON object, but 'nonsense'"),
        ("data: [1]\n\n", "no JSON object"),
        ("data: " + "x" * (20 << 20), "cannot be read"),
    ],
    ids=["cut", "empty", "text", "list", "endless"],
)
def test_answers_that_are_none(answering: Answering, data: str, problem: str) -> None:
    """Each is an error of ours that says what came."""
    with pytest.raises(ServerAnswerError, match=problem):
        stream(answering(body(data)))


def test_a_server_that_hangs_up(answering: Answering) -> None:
    """Amid the headers or amid the body: a broken answer."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def later(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"a": 1}\n\n')
        return await handler(request)

    for broken in (handler, later):
        with pytest.raises(ServerAnswerError, match="the connection broke"):
            stream(answering(broken))


def test_nobody_there() -> None:
    """A port on which nobody listens is named, with what to do."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(ServerUnreachable, match=rf":{port}/v1 cannot be reached: .*refused"):
        stream(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("waits", [Waits(total=0.2), Waits(silence=0.2)])
def test_a_server_that_is_silent(answering: Answering, waits: Waits) -> None:
    """Ends with the deadline that passed."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    with pytest.raises(DeadlineError, match=r"within 0\.2 s .* --timeout"):
        stream(answering(handler), waits=waits)


@pytest.mark.parametrize(
    ("data", "status", "expected"),
    [
        ('{"data": [{"id": "one"}, {"id": "two"}, {"id": 3}, 4]}', 200, ["one", "two"]),
        ('{"data": null}', 200, []),
        ("{}", 404, []),
    ],
)
def test_models(answering: Answering, data: str, status: int, expected: list[str]) -> None:
    """The names that are names; none where there is no list."""
    assert models(answering(body(data, status))) == expected


def test_models_behind_a_key(answering: Answering) -> None:
    """Other refusals are not taken for an empty list."""
    with pytest.raises(ServerRefusal):
        models(answering(body("{}", 401)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://host:1", "http://host:1/v1"),
        ("http://host:1/", "http://host:1/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("http://host/api/openai", "http://host/api/openai"),
        ("http://[::1]:8080", "http://[::1]:8080/v1"),
    ],
)
def test_base_urls(given: str, expected: str) -> None:
    """/v1 is added where there is no path."""
    assert base_url(given, "--url") == expected


@pytest.mark.parametrize("given", ["", "host:80", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_url(given: str) -> None:
    """Refused with the flag's name."""
    with pytest.raises(UsageError, match="--url"):
        base_url(given, "--url")
    assert issubclass(UsageError, MlxcelError)
