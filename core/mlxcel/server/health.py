"""``/health`` and ``/metrics``."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from mlxcel.server.serving import SERVING

LOADING_SECONDS = "2"


async def health(request: web.Request) -> web.Response:
    """How far the server and each of its stages are; 200 only when it takes requests."""
    backend = request.app[SERVING].backend
    phase = backend.phase
    body: dict[str, Any] = {
        "status": "ok" if phase == "ready" else phase,
        "stages": [
            {
                "stage": stage.stage,
                "ranks": stage.ranks,
                "layers": f"{stage.layers[0]}-{stage.layers[1] - 1}",
                "bytes_done": stage.bytes_done,
                "bytes_total": stage.bytes_total,
                "ready": stage.ready,
            }
            for stage in backend.stages
        ],
    }
    if backend.error is not None:
        body["error"] = str(backend.error)
    if phase == "ready":
        return web.json_response(body)
    headers = {"Retry-After": LOADING_SECONDS} if phase == "loading" else {}
    return web.json_response(body, status=503, headers=headers)


async def metrics(request: web.Request) -> web.Response:
    """All figures in Prometheus's text format."""
    text, content_type = request.app[SERVING].metrics.exposition()
    return web.Response(body=text, headers={"Content-Type": content_type})
