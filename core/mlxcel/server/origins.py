"""Web pages of other origins: what their browser is told they may do (WHATWG Fetch, CORS)."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from mlxcel.server.errors import ApiError
from mlxcel.server.fields import quoted
from mlxcel.server.serving import SERVING

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ANYBODY = "*"
LOCAL_NAMES = (".local", ".localhost")
"""Names of the local network and of this machine (RFC 6762, RFC 6761); so are those of one word."""

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


@web.middleware
async def refuse_foreign_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a page of another origin asks that is not let in.

    A browser keeps answers from such a page, but sends simple requests all the same; programs
    send no origin. The server's own pages may ask, unless their address is a name that somebody
    may have made to lead here: then the browser takes a foreign page for one of ours (DNS
    rebinding).
    """
    origin = request.headers.get(hdrs.ORIGIN)
    if (
        origin is not None
        and request.method not in (hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS)
        and _allowed_origin(request) is None
        and not (origin.partition("://")[2] == request.host and _nobody_elses(request.host))
    ):
        text = f"Pages of {quoted(origin)} may not use this server; --allowed-origins lets them."
        raise ApiError(403, text, "origin_not_allowed")
    return await handler(request)


def _nobody_elses(host: str) -> bool:
    """Whether ``host``, a port included, is an address or a name that no stranger can register."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.endswith(LOCAL_NAMES) or (name != "" and "." not in name)
    return True


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
