"""Events on the wire: at once where that is possible, kept where it is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mlxcel.server.event_stream import FULL, GONE, EventStream
from mlxcel.server.run import make_runner

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def with_server(handler: Handler, visit: Callable[[int], Awaitable[Any]]) -> Any:
    app = web.Application()
    app.router.add_get("/", handler)
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        return await visit(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def raw(version: str) -> Callable[[int], Awaitable[bytes]]:
    """Asks in HTTP of ``version`` and reads all there is."""

    async def visit(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET / HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        data = await reader.read()
        writer.close()
        return data.partition(b"\r\n\r\n")[2]

    return visit


async def ten_events(request: web.Request) -> web.StreamResponse:
    events = EventStream(request, patience=60, backlog=100)
    for number in range(10):
        events.send(b"data: %d\n\n" % number)
        if events.kept:
            await events.flush()
    events.send(b"data: last\n\n")
    await events.end()
    return events.response


WANTED = b"".join(b"data: %d\n\n" % number for number in range(10)) + b"data: last\n\n"


async def test_chunks_are_those_of_http() -> None:
    """What is written past aiohttp is a body that clients read, and the connection lives on."""

    async def visit(port: int) -> list[bytes]:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            bodies = []
            for _ in range(3):
                async with session.get("/") as response:
                    bodies.append(await response.read())
            return bodies

    assert await with_server(ten_events, visit) == [WANTED] * 3


async def test_an_old_client_gets_no_chunks() -> None:
    """HTTP/1.0 has no chunks; its clients read until the connection ends."""
    assert await with_server(ten_events, raw("1.0")) == WANTED
    assert b"data: last\n\n\r\n0\r\n\r\n" in await with_server(ten_events, raw("1.1"))


async def test_events_go_out_at_once() -> None:
    """Once the answer has begun nothing is kept, and nobody is woken."""
    woken: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        events = EventStream(request, patience=60, backlog=100)
        events.on_kept = lambda: woken.append("kept")
        events.send(b"data: a\n\n")
        assert events.kept and not events.started
        await events.flush()
        for _ in range(5):
            events.send(b"data: b\n\n")
        assert not events.kept
        await events.end()
        return events.response

    await with_server(handler, raw("1.1"))
    assert woken == ["kept"]


@pytest.mark.parametrize("patience", [0.01, 60.0])
async def test_a_client_that_does_not_read(patience: float) -> None:
    """What it leaves unread is kept up to a bound, and then it is hung up on."""
    outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def handler(request: web.Request) -> web.StreamResponse:
        events = EventStream(request, patience, backlog=50)
        events.send(b": hello\n\n")
        await events.flush()
        try:
            for count in range(10_000):
                events.send(b"x" * FULL)
                if request.transport is None or request.transport.is_closing():
                    outcome.set_result("backlog")
                    break
                if events.kept and patience < 1:
                    await events.flush()
                assert count < 9_000
        except GONE:
            outcome.set_result("patience")
        return events.response

    async def visit(port: int) -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        found = await asyncio.wait_for(outcome, 60)
        writer.close()
        return found

    assert await with_server(handler, visit) == ("patience" if patience < 1 else "backlog")


async def test_a_client_that_has_left() -> None:
    """Whoever waits is woken by the next event, and nothing is raised where it is sent."""
    woken = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        events = EventStream(request, patience=60, backlog=5)
        events.send(json.dumps({}).encode())
        await events.flush()
        assert request.transport is not None
        request.transport.abort()
        events.on_kept = woken.set
        events.send(b"data: a\n\n")
        return events.response

    await with_server(handler, raw("1.1"))
    assert woken.is_set()
