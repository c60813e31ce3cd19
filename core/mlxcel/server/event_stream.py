"""Server-sent events: the body of an answer that streams (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio

from aiohttp import ClientConnectionError, web

GONE = (ConnectionError, ClientConnectionError)
"""What a write raises when the client has hung up."""


class EventStream:
    """Writes events to the client of ``request``; the first write sends status and headers.

    Every method raises one of :data:`GONE` when the client has hung up, or has not read for
    ``patience`` seconds, in which case the connection is cut.
    """

    def __init__(self, request: web.Request, patience: float) -> None:
        self.response = web.StreamResponse()
        self.response.content_type = "text/event-stream"
        self.response.headers["Cache-Control"] = "no-cache"
        self.response.headers["X-Accel-Buffering"] = "no"  # proxies must not hold it back
        self._request = request
        self._patience = patience

    @property
    def started(self) -> bool:
        """Whether it is too late to answer with another status."""
        return self.response.prepared

    async def send(self, *events: bytes) -> None:
        """Send each of ``events`` as the data of one event."""
        await self._write(b"".join(b"data: %b\n\n" % event for event in events))

    async def comment(self, text: bytes) -> None:
        """Send something that readers ignore, to show that the connection lives."""
        await self._write(b": %b\n\n" % text)

    async def end(self) -> None:
        """Finish the body."""
        await self._write(None)

    async def _write(self, data: bytes | None) -> None:
        try:
            async with asyncio.timeout(self._patience):
                if not self.started:
                    await self.response.prepare(self._request)
                if data is None:
                    await self.response.write_eof()
                else:
                    await self.response.write(data)
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
