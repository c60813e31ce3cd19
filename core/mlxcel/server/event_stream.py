"""Server-sent events: the body of an answer that streams (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import ClientConnectionError, web

GONE = (ConnectionError, ClientConnectionError)
"""What a write raises when the client has hung up."""

FULL = 1 << 16
"""Bytes that wait in the connection's own buffer before more are kept back."""


class EventStream:
    """Writes events to the client of ``request``.

    Most events go out at once, from whoever sends them, without a coroutine: a server that
    streams to many clients spends more on waking than on writing. What cannot go out, because
    the answer has not begun or the client reads too slowly, is kept for :meth:`flush`.

    Args:
        request: Whose answer it is.
        patience: Seconds that the client may take to read what is flushed.
        backlog: Sends that may be kept before the client is given up.

    Attributes:
        response: The answer.
        spoken: When something was last sent (seconds of the loop's clock).
        on_kept: Called when there is something to flush, or the client has gone.
    """

    def __init__(self, request: web.Request, patience: float, backlog: int) -> None:
        self.response = web.StreamResponse()
        self.response.content_type = "text/event-stream"
        self.response.headers["Cache-Control"] = "no-cache"
        self.response.headers["X-Accel-Buffering"] = "no"  # proxies must not hold it back
        self.on_kept: Callable[[], None] = lambda: None
        self._request = request
        self._patience = patience
        self._backlog = backlog
        self._kept: list[bytes] = []
        self._direct: asyncio.Transport | None = None
        self._clock = asyncio.get_running_loop().time
        self.spoken = self._clock()

    @property
    def started(self) -> bool:
        """Whether it is too late to answer with another status."""
        return self.response.prepared

    @property
    def kept(self) -> bool:
        """Whether something waits to be flushed."""
        return bool(self._kept)

    def send(self, events: bytes) -> None:
        """Send events, or keep them; never waits.

        A client that has left too much unread is hung up on.
        """
        wire = self._direct
        if wire is not None and not self._kept and wire.get_write_buffer_size() < FULL:
            if wire.is_closing():
                self.on_kept()  # so that whoever waits sees it
                return
            # As aiohttp would write it: one chunk of a chunked body.
            wire.write(b"%x\r\n%b\r\n" % (len(events), events))
            self.spoken = self._clock()
            return
        self._kept.append(events)
        if len(self._kept) > self._backlog:
            self._kept.clear()
            hang_up(self._request)
        self.on_kept()

    async def flush(self) -> None:
        """Send what was kept; the first time, status and headers go before it.

        Raises:
            ConnectionError, ClientConnectionError: The client has hung up, or does not read.
        """
        if self.started and not self._kept:
            return
        events = b"".join(self._kept)
        self._kept.clear()
        await self._patiently(self._write(events))
        self.spoken = self._clock()
        # An HTTP/1.0 client gets no chunks; for such a rarity the long way will do.
        if self.response.headers.get("Transfer-Encoding") == "chunked":
            transport = self._request.transport
            self._direct = transport if isinstance(transport, asyncio.Transport) else None

    async def end(self) -> None:
        """Send what was kept, and finish the body; raises as :meth:`flush`."""
        self._direct = None
        events = b"".join(self._kept)
        self._kept.clear()
        await self._patiently(self._finish(events))

    async def _write(self, events: bytes) -> None:
        if not self.started:
            await self.response.prepare(self._request)
        await self.response.write(events)

    async def _finish(self, events: bytes) -> None:
        if not self.started:
            await self.response.prepare(self._request)
        await self.response.write_eof(events)

    async def _patiently(self, writing: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await writing
        except TimeoutError:
            hang_up(self._request)
            raise ConnectionResetError("the client does not read") from None


def hang_up(request: web.Request) -> None:
    """Cut the client's connection, whatever is still to be written to it."""
    if request.transport is not None:
        request.transport.abort()


def has_gone(request: web.Request) -> bool:
    """Whether the client has hung up."""
    return request.transport is None or request.transport.is_closing()
