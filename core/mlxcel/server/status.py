"""``/status`` and ``/status/events``: what the status page shows, once or every second."""

from __future__ import annotations

from aiohttp import web

from mlxcel.observe.live import HISTORY_SECONDS
from mlxcel.server.answers import to_json
from mlxcel.server.event_stream import GONE, EventStream, has_gone
from mlxcel.server.flow import CLIENT_GONE
from mlxcel.server.serving import SERVING, Serving
from mlxcel.server.snapshot import NOW_SECONDS, snapshot
from mlxcel.server.status_feed import Feed
from mlxcel.server.status_page import page

FEED = web.AppKey("status_feed", Feed)


def add_status(app: web.Application) -> None:
    """Add the page and what it shows to ``app``, which has its :data:`SERVING` already."""
    serving = app[SERVING]
    app[FEED] = Feed(lambda: _event(serving, NOW_SECONDS))
    app.router.add_get("/", page)
    app.router.add_get("/status", status)
    app.router.add_get("/status/events", events, allow_head=False)  # it would never end
    app.on_shutdown.append(_end)


async def status(request: web.Request) -> web.Response:
    """What goes on now, with the timeline of the last minutes."""
    data = _event(request.app[SERVING], HISTORY_SECONDS)
    return web.Response(body=data, content_type="application/json")


async def events(request: web.Request) -> web.StreamResponse:
    """The same as events: the whole timeline first, then every second what is new of it."""
    serving, feed = request.app[SERVING], request.app[FEED]
    stream = EventStream(request, serving.options.patience, backlog=1)
    with feed.watching():
        try:
            stream.send(b"data: %b\n\n" % _event(serving, HISTORY_SECONDS))
            await stream.flush()
            while (event := await feed.next()) is not None and not has_gone(request):
                stream.send(b"data: %b\n\n" % event)
                await stream.flush()
            await stream.end()
        except GONE:
            return web.Response(status=CLIENT_GONE)
    return stream.response


async def _end(app: web.Application) -> None:
    """Watchers learn of the end, and their connections hold nothing up."""
    app[FEED].close()


def _event(serving: Serving, seconds: int) -> bytes:
    return to_json(snapshot(serving.options, serving.backend, seconds))
