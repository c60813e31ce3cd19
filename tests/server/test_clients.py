"""Clients that leave or do not read, and apps side by side, on a real tiny model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

Served = Callable[..., AbstractAsyncContextManager[Any]]
ENDLESS = {"prompt": "hello", "max_tokens": 100_000, "logit_bias": {"257": -100}}
"""A request that only the context ends, for its end token cannot be drawn."""


def idle(client: Any) -> bool:
    backend = client.backend
    return backend.active == backend.waiting == sum(m.used for m in backend.managers) == 0


def http(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def hang_up(client: Any, body: dict[str, Any], chunks: int) -> None:
    """Send a request, read so many events of its answer, and close the socket."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(http(body))
    if chunks:
        await reader.readuntil(b"\r\n\r\n")
    for _ in range(chunks):
        await reader.readuntil(b"\n\n")
    writer.close()


@pytest.mark.usefixtures("quiet")
async def test_clients_that_leave(tiny_served: Served, eventually: Any) -> None:
    """Hung up 20 times after two chunks: cancelled everywhere, nothing logged, alive."""
    async with tiny_served() as client:
        for _ in range(20):
            await hang_up(client, {**ENDLESS, "stream": True}, chunks=2)
        await eventually(lambda: idle(client))
        assert (await client.complete(max_tokens=3))[0] == 200


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_leave_before_the_answer(
    served: Served, eventually: Any, stream: bool
) -> None:
    """Hung up before anything was sent, streaming or not: cancelled all the same."""
    async with served() as client:
        client.gate.close()
        writers = []
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(http({**ENDLESS, "stream": stream}))
            writers.append(writer)
        await eventually(lambda: len(client.backend.requests) == 20)
        for writer in writers:
            writer.close()
        await eventually(lambda: len(client.backend.cancelled) == 20)
        client.gate.release()
        await eventually(lambda: idle(client))
        assert (await client.complete(max_tokens=3))[0] == 200


@pytest.mark.usefixtures("quiet")
async def test_clients_that_leave_at_the_end(tiny_served: Served, eventually: Any) -> None:
    """Hung up around the last chunk: nothing is left over."""
    async with tiny_served() as client:
        for _ in range(20):
            await hang_up(client, {"prompt": "hello", "max_tokens": 2, "stream": True}, chunks=2)
        await eventually(lambda: idle(client))
        assert (await client.complete(max_tokens=3))[0] == 200


@pytest.mark.usefixtures("quiet")
async def test_a_client_that_does_not_read(tiny_served: Served, eventually: Any) -> None:
    """Its request is cancelled once its outputs pile up; others notice nothing."""
    # The name stands in every chunk, so that few of them fill the socket's buffers.
    async with tiny_served(model_id="m" * 50_000, backlog=20) as client:
        _, writer = await asyncio.open_connection("127.0.0.1", client.port, limit=1)
        writer.write(http({**ENDLESS, "stream": True}))
        await eventually(lambda: client.backend.active == 1)
        assert (await client.complete(max_tokens=20))[0] == 200
        await eventually(lambda: idle(client))
        assert (await client.complete(max_tokens=3))[0] == 200
        writer.close()


async def test_same_tokens_as_alone(tiny_served: Served) -> None:
    """Streams side by side say what each says alone, greedy and drawn."""
    bodies = [
        {"prompt": "abc" * (index + 1), "max_tokens": 12 + index, "seed": index}
        | ({"temperature": 0.8} if index % 2 else {})
        for index in range(8)
    ]
    async with tiny_served() as client:
        alone = [await client.text(**body) for body in bodies]
        together = await asyncio.gather(*(client.text(**body) for body in bodies))
        streams = await asyncio.gather(*(client.chunks("/v1/completions", b) for b in bodies))
        assert together == alone
        for chunks, (text, _) in zip(streams, alone, strict=True):
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


async def test_two_apps_in_one_process(tiny_served: Served, served: Served) -> None:
    """Apps share nothing: neither metrics nor requests."""
    async with tiny_served(metrics=True) as one, served("other", metrics=True) as two:
        assert (await one.complete(max_tokens=3))[0] == 200
        assert await two.text() == ("other", "stop")
        for client, tokens in ((one, 3), (two, 5)):
            async with client.session.get("/metrics") as response:
                assert f"mlxcel_generated_tokens_total {tokens}.0" in await response.text()
