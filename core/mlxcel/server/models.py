"""``/v1/models``: the one model that is served."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from mlxcel.server.errors import ApiError
from mlxcel.server.fields import quoted
from mlxcel.server.serving import SERVING, Serving

MODEL = web.RequestKey("model", str)
"""The model's name as the client gave it, once it is known."""


async def list_models(request: web.Request) -> web.Response:
    """The models that there are."""
    return web.json_response({"object": "list", "data": [_model(request.app[SERVING])]})


async def get_model(request: web.Request) -> web.Response:
    """One model by its name."""
    serving = request.app[SERVING]
    request[MODEL] = request.match_info["id"]
    check_model(serving, request[MODEL])
    return web.json_response(_model(serving))


def check_model(serving: Serving, name: str | None) -> None:
    """Refuse a request for another model; no name means the one there is.

    Raises:
        ApiError: The model is not served here.
    """
    if name is not None and not serving.options.knows(name):
        text = f"There is no model {quoted(name)} here; {quoted(serving.options.model_id)} is."
        raise ApiError(404, text, "model_not_found", "model")


def _model(serving: Serving) -> dict[str, Any]:
    model = {
        "id": serving.options.model_id,
        "object": "model",
        "created": serving.created,
        "owned_by": "mlxcel",
    }
    size = serving.context_size
    return model if size is None else {**model, "context_size": size}
