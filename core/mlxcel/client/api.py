"""A client of one server that speaks OpenAI's API."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import attrs
from aiohttp.http_exceptions import HttpProcessingError

from mlxcel.client.events import read_events
from mlxcel.errors import (
    DeadlineError,
    ServerAnswerError,
    ServerRefusal,
    ServerUnreachable,
    UsageError,
)

CONNECT_SECONDS = 10.0
LONGEST_LINE = 8 << 20
LONGEST_QUOTE = 300
DONE = b"[DONE]"

Object = dict[str, Any]


@attrs.frozen
class Waits:
    """How long a client waits, in seconds: for a whole answer, and while nothing comes."""

    total: float | None = None
    silence: float | None = None


@attrs.frozen(eq=False)
class Api:
    """A server at ``url``, the base that ends in ``/v1`` as a rule; see :func:`connect`.

    Every method raises what :mod:`mlxcel.errors` has for servers: ServerUnreachable,
    ServerRefusal, ServerAnswerError, or a DeadlineError.
    """

    url: str
    waits: Waits
    _session: aiohttp.ClientSession

    async def models(self) -> list[str]:
        """The names of the models that the server lists; none if it has no such list."""
        try:
            listed = await self._object("GET", "/models")
        except ServerRefusal as error:
            if error.status == 404:
                return []
            raise
        models = listed.get("data")
        entries = models if isinstance(models, list) else []
        names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
        return [name for name in names if isinstance(name, str)]

    async def post(self, path: str, body: Mapping[str, Any]) -> Object:
        """The whole answer to ``body``."""
        return await self._object("POST", path, body)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Object]:
        """The chunks of the answer to ``body``, which must ask for a stream, up to its end."""
        with self._explained(f"an answer to {path}"):
            async with self._session.post(self.url + path, json=body) as response:
                if response.status != 200:
                    raise await self._refusal(response)
                async for data in read_events(response.content):
                    if data == DONE:
                        return
                    chunk = self._parsed(data)
                    if isinstance(chunk.get("error"), dict):
                        raise _refused(self.url, None, chunk)
                    yield chunk
        raise ServerAnswerError(self.url, "the answer ended before it was finished")

    async def _object(self, method: str, path: str, body: object = None) -> Object:
        with self._explained(f"an answer to {path}"):
            async with self._session.request(method, self.url + path, json=body) as response:
                if response.status != 200:
                    raise await self._refusal(response)
                return self._parsed(await response.read())

    async def _refusal(self, response: aiohttp.ClientResponse) -> ServerRefusal:
        data = await response.content.read(LONGEST_LINE)
        try:
            body = self._parsed(data)
        except ServerAnswerError:
            text = data.decode("utf-8", "replace").strip() or response.reason or "nothing"
            body = {"error": text[:LONGEST_QUOTE]}
        after = response.headers.get("Retry-After", "")
        return _refused(self.url, response.status, body, float(after) if after.isdigit() else None)

    def _parsed(self, data: bytes) -> Object:
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            text = data[:LONGEST_QUOTE].decode("utf-8", "replace")
            raise ServerAnswerError(self.url, f"no JSON object, but {text!r}")
        return value

    @contextmanager
    def _explained(self, operation: str) -> Iterator[None]:
        """Turn aiohttp's errors into ours."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError:
            cause = f"no connection within {CONNECT_SECONDS:g} s"
            raise ServerUnreachable(self.url, cause) from None
        except TimeoutError as error:
            silent = isinstance(error, aiohttp.SocketTimeoutError)
            seconds = (self.waits.silence if silent else self.waits.total) or CONNECT_SECONDS
            way_out = "Allow more time with --timeout, or find out why it hangs."
            raise DeadlineError(self.url, operation, seconds, way_out) from None
        except aiohttp.ClientConnectorError as error:
            raise ServerUnreachable(self.url, _cause(error.os_error)) from error
        except (aiohttp.ClientError, OSError) as error:
            problem = f"the connection broke ({type(error).__name__})"
            raise ServerAnswerError(self.url, problem) from error
        except (HttpProcessingError, ValueError) as error:  # such as a line that is too long
            problem = f"an answer that cannot be read ({type(error).__name__})"
            raise ServerAnswerError(self.url, problem) from error


@asynccontextmanager
async def connect(url: str, key: str | None, waits: Waits) -> AsyncIterator[Api]:
    """A client of the server at the base ``url``; the connections end with the context.

    Args:
        url: As of :func:`base_url`.
        key: Sent as a bearer token.
        waits: How long any one answer may take.
    """
    timeout = aiohttp.ClientTimeout(
        total=waits.total, sock_connect=CONNECT_SECONDS, sock_read=waits.silence
    )
    async with aiohttp.ClientSession(
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        timeout=timeout,
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=LONGEST_LINE // 2,  # a line may be twice as long
    ) as session:
        yield Api(url, waits, session)


def base_url(url: str, flag: str) -> str:
    """``url`` as OpenAI's clients want it: with the path ``/v1`` where it has none.

    Raises:
        UsageError: ``url``, which was given to ``flag``, is no URL of HTTP.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(f"{flag} {url} is no URL.", "Give one such as http://127.0.0.1:8080.")
    base = url.rstrip("/")
    return base if parts.path.strip("/") else f"{base}/v1"


def _refused(
    url: str, status: int | None, body: Object, retry_after: float | None = None
) -> ServerRefusal:
    """The error that ``body`` tells of: an object under ``error`` as OpenAI has it, or a text."""
    told = body.get("error", body.get("detail", body))
    fields = told if isinstance(told, dict) else {"message": told}
    message, code = fields.get("message"), fields.get("code")
    problem = message if isinstance(message, str) else json.dumps(told)[:LONGEST_QUOTE]
    return ServerRefusal(url, status, problem, code if isinstance(code, str) else None, retry_after)


def _cause(error: OSError) -> str:
    """What the system says; asyncio's own text has the address instead."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)  # no such host
