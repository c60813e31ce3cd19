"""Where an application is served: what takes the port, and how many may come."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from mlxcel.errors import AddressError
from mlxcel.server import run as run_module
from mlxcel.server.run import bind, make_runner
from mlxcel.server.site import Site, url_of

WAIT = 30.0
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def serving(sock: socket.socket, most: int | None = None) -> AsyncIterator[web.AppRunner]:
    """An application without pages, on ``sock``."""
    runner = make_runner(web.Application())
    await runner.setup()
    try:
        async with asyncio.timeout(WAIT):
            await Site(runner, sock, most).start()
            yield runner
    finally:
        await runner.cleanup()
        sock.close()


async def half_a_request(port: int) -> Ends:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTT")
    return reader, writer


async def answered(port: int) -> Ends:
    """A connection that has had an answer, and is kept alive."""
    end = await asyncio.open_connection("127.0.0.1", port)
    await ask(end)
    return end


async def ask(end: Ends) -> None:
    reader, writer = end
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 404 " in head
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    await reader.readexactly(length)


async def test_one_connection_too_many_closes_the_oldest() -> None:
    """However fast they come; the newest are answered."""
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    async with serving(sock, most=4) as runner:
        ends = await asyncio.gather(*(half_a_request(port) for _ in range(60)))
        last = await half_a_request(port)
        last[1].write(b"P/1.1\r\nHost: x\r\n\r\n")
        assert b" 404 " in await last[0].readline()
        server = runner.server
        assert server is not None
        assert len([c for c in server.connections if c.transport is not None]) <= 4
        waiting = {asyncio.ensure_future(reader.read()) for reader, _ in ends}
        while len(waiting) >= 4:  # until so many are closed
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for _, writer in (*ends, last):
            writer.close()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_as_many_connections_as_there_may_be_stay_open() -> None:
    """Nobody is cut off while there is room; one more closes the first and no other."""
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    async with serving(sock, most=6):
        ends = [await answered(port) for _ in range(6)]
        for end in ends:
            await ask(end)
        late = await answered(port)
        assert await ends[0][0].read() == b""
        for end in (*ends[1:], late):
            await ask(end)
        for _, writer in (*ends, late):
            writer.close()


async def test_half_a_request_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not finish a request's head loses the connection, and its open file."""
    monkeypatch.setattr(run_module, "IDLE_SECONDS", 0.05)
    sock = bind("127.0.0.1", 0)
    async with serving(sock):
        reader, writer = await half_a_request(sock.getsockname()[1])
        assert await reader.read() == b""
        writer.close()


def test_a_port_that_is_taken_is_nobody_elses() -> None:
    """Neither for one who listens nor for one who takes it only, before anybody listens."""
    with bind("127.0.0.1", 0, listen=False) as sock:
        port = sock.getsockname()[1]
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
        for listen in (False, True):
            with pytest.raises(AddressError, match=f"port {port}: Address already in use"):
                bind("127.0.0.1", port, listen=listen)


@pytest.mark.parametrize("listen", [False, True])
async def test_a_server_can_be_started_again_at_once(listen: bool) -> None:
    """The connections of the one before, which the system remembers, keep nobody from its port."""
    sock = bind("127.0.0.1", 0, listen=False)
    port = sock.getsockname()[1]
    async with serving(sock):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        await reader.read()  # the server has closed first, so its end is the one that lingers
    writer.close()
    bind("127.0.0.1", port, listen=listen).close()


async def test_a_port_that_somebody_else_listens_on_by_now() -> None:
    """It has a typed error, whoever lost the race."""
    with socket.socket() as ours, socket.socket() as theirs:
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ours.bind(("127.0.0.1", 0))
        try:
            theirs.bind(ours.getsockname())
        except OSError:
            pytest.skip("this system gives a port to one only")
        theirs.listen()
        with pytest.raises(AddressError, match=r"127\.0\.0\.1.*already in use"):
            async with serving(ours):
                pass


def test_an_address_is_shown_as_a_url() -> None:
    """One that a browser takes."""
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
