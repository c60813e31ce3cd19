"""From a job to its answer, whole or as events, while the client stays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from mlxcel.engine.sequence import Output
from mlxcel.server.answers import Answer, to_json
from mlxcel.server.dispatch import Stream
from mlxcel.server.errors import as_api_error
from mlxcel.server.event_stream import GONE, EventStream, has_gone
from mlxcel.server.job import Job
from mlxcel.server.serving import Serving

LOOK_SECONDS = 1.0
"""How often to look whether the client is still there while it gets nothing."""

CLIENT_GONE = 499
"""The status, seen by nobody but the metrics, of a request whose client hung up."""

FAILED = web.RequestKey("failed", int)
"""The status that an answer would have had which failed when its events had begun."""

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def unless_gone(handler: Handler) -> Handler:
    """``handler``, which may end early because the client has hung up."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except GONE:
            return web.Response(status=CLIENT_GONE)

    return handle


async def respond(
    request: web.Request, serving: Serving, job: Job, answer: Answer
) -> web.StreamResponse:
    """Run ``job`` and answer ``request``.

    Raises:
        MlxcelError: It cannot be run, or failed before anything was sent.
        ConnectionError, ClientConnectionError: The client has hung up.
    """
    respond = _stream if job.generation.stream else _whole
    return await respond(request, serving, job, answer)


async def _whole(request: web.Request, serving: Serving, job: Job, answer: Answer) -> web.Response:
    choices = job.choices()

    def hear(number: int, output: Output) -> None:
        if output.error is not None:
            raise output.error
        choices[number].keep(output)

    with serving.submitted(job.requests(serving.context_size), hear) as stream:
        _count_prompts(serving, job)
        while stream.running:
            await _wait(request, stream, LOOK_SECONDS)
        if stream.error is not None:
            raise stream.error
    body = to_json(answer.whole(choices))
    return web.Response(body=body, content_type="application/json")


async def _stream(
    request: web.Request, serving: Serving, job: Job, answer: Answer
) -> web.StreamResponse:
    """Send what comes as events.

    Nothing is sent before there is something to say, so that a request which fails without a
    token still gets a status of its own; unless it takes long.
    """
    options = serving.options
    events = EventStream(request, options.patience, options.backlog)
    choices, begun, ended = job.choices(), False, 0

    def hear(number: int, output: Output) -> None:
        nonlocal begun, ended
        if output.error is not None:
            raise output.error
        choice = choices[number]
        data = answer.piece(choice, choice.take(output), output)
        if not begun:
            begun, data = True, answer.opening(choices) + data
        if output.finish_reason is not None:
            data += answer.last(choice)
            ended += 1
            if ended == len(choices):
                data += answer.closing(choices, job.generation.include_usage)
        if data:
            events.send(data)

    look = min(LOOK_SECONDS, options.keep_alive)
    clock = asyncio.get_running_loop().time
    with serving.submitted(job.requests(serving.context_size), hear) as stream:
        _count_prompts(serving, job)
        events.on_kept = stream.wake
        try:
            while stream.running:
                if not events.kept:
                    await _wait(request, stream, look)
                if stream.running and clock() - events.spoken >= options.keep_alive:
                    events.send(answer.still_here())
                if stream.running and events.kept:
                    await events.flush()
            if stream.error is not None:
                raise stream.error
        except GONE:
            raise
        except Exception as error:
            if not events.started:
                raise
            explained = as_api_error(error)
            if explained.code == "internal_error":
                _log.error("%s %s failed", request.method, request.path, exc_info=error)
            request[FAILED] = explained.status
            events.send(answer.failure(explained))
    await events.end()
    return events.response


async def _wait(request: web.Request, stream: Stream, seconds: float) -> None:
    """Wait for something to do, and see that the client is still there."""
    await stream.wait(seconds)
    if has_gone(request):
        raise ConnectionResetError("the client has hung up")


def _count_prompts(serving: Serving, job: Job) -> None:
    serving.metrics.prompt_tokens.inc(sum(len(prompt.tokens) for prompt in job.prompts))
