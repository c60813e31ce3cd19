"""Web pages of other origins: what their browser is told they may do (WHATWG Fetch, CORS)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from mlxcel.server.serving import SERVING

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ANYBODY = "*"
PREFLIGHT_SECONDS = "600"
"""How long a browser need not ask again."""


@web.middleware
async def answer_preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what a browser asks before it sends a page's request; it brings no key yet."""
    refusal = request.match_info.http_exception
    if (
        request.method != hdrs.METH_OPTIONS
        or hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers
        or not isinstance(refusal, web.HTTPMethodNotAllowed)  # else there is no such path
        or _allowed_origin(request) is None
    ):
        return await handler(request)
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: ", ".join(sorted(refusal.allowed_methods)),
        hdrs.ACCESS_CONTROL_MAX_AGE: PREFLIGHT_SECONDS,
    }
    if asked := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
    return web.Response(status=204, headers=headers)


async def tell_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Say in the headers of any answer whether the page that asked for it may read it."""
    allowed = request.app[SERVING].options.allowed_origins
    if allowed and ANYBODY not in allowed:
        response.headers[hdrs.VARY] = hdrs.ORIGIN  # a cache must not give it to others
    if (origin := _allowed_origin(request)) is not None:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = hdrs.RETRY_AFTER


def _allowed_origin(request: web.Request) -> str | None:
    """What to call the origin of the page that asks, if there is one and it is let in."""
    origin, allowed = request.headers.get(hdrs.ORIGIN), request.app[SERVING].options.allowed_origins
    if origin is None:
        return None
    if ANYBODY in allowed:
        return ANYBODY
    return origin if origin in allowed else None
