"""What happens around every request: keys, errors, counting."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from mlxcel.server.answers import to_json
from mlxcel.server.errors import ApiError, as_api_error
from mlxcel.server.flow import FAILED
from mlxcel.server.messages import PATH
from mlxcel.server.messages_answer import error_body
from mlxcel.server.models import MODEL
from mlxcel.server.serving import SERVING

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = ("/", "/health")
"""What needs no key: whoever watches the server has none, and the page asks for one."""

KEY_HEADER = "x-api-key"
"""Where Anthropic's clients bring their key."""

_log = logging.getLogger(__name__)


@web.middleware
async def count_and_explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into the objects of the API that was called, and count every answer."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = _error_response(request, _of_http(request, error))
    except Exception as error:
        explained = as_api_error(error)
        if explained.code == "internal_error":
            _log.error("%s %s failed", request.method, request.path, exc_info=error)
        response = _error_response(request, explained)
    serving = request.app[SERVING]
    resource = request.match_info.route.resource
    endpoint = "other" if resource is None else resource.canonical
    name = request.get(MODEL, serving.options.model_id)
    status = request.get(FAILED, response.status)
    serving.metrics.answered(endpoint, serving.options.knows(name), status)
    return response


@web.middleware
async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse who brings no key, if there are keys."""
    keys = request.app[SERVING].options.api_keys
    if keys and request.path not in OPEN_PATHS and not _has_key(request, keys):
        text = "A valid API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
        scheme = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, text, "invalid_api_key", more_headers=scheme)
    return await handler(request)


def _has_key(request: web.Request, keys: tuple[str, ...]) -> bool:
    """Whether the request brings one of ``keys``; how long that takes tells nothing of them."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    bearer = given.strip() if scheme.lower() == "bearer" else ""
    found = False
    for brought in (bearer, request.headers.get(KEY_HEADER, "").strip()):
        for key in keys:
            found |= hmac.compare_digest(_digest(brought), _digest(key))
    return found


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _of_http(request: web.Request, error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals in the common form."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.app[SERVING].options.max_body_size
        text = f"The body is larger than {limit} bytes, which is all that is allowed."
        return ApiError(413, text, "body_too_large")
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, f"There is no {request.path} here.", "not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = sorted(error.allowed_methods)
        text = f"{request.path} wants {' or '.join(allowed)}, not {request.method}."
        return ApiError(405, text, "method", more_headers={"Allow": ", ".join(allowed)})
    return ApiError(error.status, error.reason, "http")


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    anthropic = request.path.startswith(PATH)
    return web.Response(
        body=to_json(error_body(error) if anthropic else error.body()),
        status=error.status,
        headers=error.headers(),
        content_type="application/json",
    )
