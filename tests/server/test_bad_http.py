"""Clients that speak broken HTTP, or leave in the middle of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

Served = Callable[..., AbstractAsyncContextManager[Any]]

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


async def answer_to(port: int, data: bytes) -> bytes:
    """All that the server says to ``data`` before it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\x00" + bytes(200),
        b"no http at all\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"X: " + b"a" * 20_000 + b"\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["tls", "text", "length", "header", "chunk"],
)
async def test_what_is_no_http(served: Served, data: bytes) -> None:
    """It gets status 400, and nothing is logged: whoever likes can send it."""
    async with served() as client:
        assert b" 400 " in (await answer_to(client.port, data)).splitlines()[0]
        assert (await client.complete())[0] == 200


@pytest.mark.usefixtures("quiet")
async def test_a_body_that_stops_being_http(served: Served) -> None:
    """A chunk that is none is told at once, however well the body began."""
    async with served() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(POST + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b'5\r\n{"pro\r\n' + b"zz\r\n")
        async with asyncio.timeout(30):  # half of what a slow body may take
            assert b" 400 " in (await reader.readuntil(b"\r\n"))
        writer.close()
        assert (await client.complete())[0] == 200


@pytest.mark.usefixtures("quiet")
async def test_a_body_in_pieces(served: Served) -> None:
    """A body may take its time, and come in chunks."""
    async with served("ok") as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(POST + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        for piece in (b'{"prompt"', b': "a"}', b""):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        assert b" 200 " in await reader.readuntil(b"\r\n")
        writer.close()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
async def test_an_encoded_body(served: Served, encoding: str) -> None:
    """A body with a Content-Encoding is refused by name, whatever it holds."""
    async with served() as client:
        headers = {"Content-Encoding": encoding}
        status, body = await client.post("/v1/completions", b"no gzip", headers=headers)
        assert (status, body["error"]["code"]) == (415, "content_encoding")
        assert encoding in body["error"]["message"]


@pytest.mark.usefixtures("quiet")
async def test_a_client_that_leaves_before_its_body_ends(served: Served) -> None:
    """It counts as one that hung up, and nothing is logged."""
    async with served(metrics=True) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n")
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        counted = 'status="499"'
        async with asyncio.timeout(60):
            while True:
                async with client.session.get("/metrics") as response:
                    if counted in await response.text():
                        break
