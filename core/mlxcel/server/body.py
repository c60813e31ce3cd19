"""The body of a request, as bytes."""

from __future__ import annotations

import asyncio

from aiohttp import web

from mlxcel.server.errors import ApiError

BODY_SECONDS = 60.0
"""How long a client may take to send its request."""

LOOK_SECONDS = 0.1
"""How often to look whether what still comes is HTTP at all."""


async def read_body(request: web.Request) -> bytes:
    """All of the body.

    Raises:
        ApiError: It is compressed, is no HTTP, or does not come in time.
        ConnectionError, ClientConnectionError: The client has hung up.
    """
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        text = f"The body is encoded ({encoding}); send it without a Content-Encoding."
        raise ApiError(415, text, "content_encoding")
    if request.content.is_eof():
        return await request.read()
    reading = asyncio.ensure_future(request.read())
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while not reading.done():
                await asyncio.wait([reading], timeout=LOOK_SECONDS)
                if not reading.done() and _is_broken(request):
                    raise ApiError(400, "The body is not valid HTTP.", "http")
        return reading.result()
    except TimeoutError:
        raise ApiError(408, "The body did not come in time.", "timeout") from None
    finally:
        reading.cancel()


def _is_broken(request: web.Request) -> bool:
    """Whether something follows this body, which has no end: only what is no HTTP can.

    aiohttp queues its complaint behind the request and tells the handler nothing.
    """
    return bool(getattr(request.protocol, "_messages", ()))
