"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from aiohttp import web

from mlxcel.engine.sequence import Output
from mlxcel.server.answers import Answer, ChatAnswer, TextAnswer, to_json, usage
from mlxcel.server.dispatch import Stream
from mlxcel.server.errors import ApiError, as_api_error
from mlxcel.server.event_stream import GONE, EventStream, has_gone
from mlxcel.server.fields import parse_object
from mlxcel.server.models import MODEL, check_model
from mlxcel.server.prompts import chat_tokens, completion_tokens, within_context, work
from mlxcel.server.schema import (
    ChatRequest,
    CompletionRequest,
    Generation,
    read_chat,
    read_completion,
)
from mlxcel.server.serving import SERVING, Serving

BODY_SECONDS = 60.0
"""How long a client may take to send its request."""

LOOK_SECONDS = 1.0
"""How often to look whether the client is still there while it gets nothing."""

CLIENT_GONE = 499
"""The status, seen by nobody but the metrics, of a request whose client hung up."""

DONE = b"[DONE]"

B = TypeVar("B", ChatRequest, CompletionRequest)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    serving = request.app[SERVING]
    answer = ChatAnswer(serving.options.model_id)
    return await _respond(request, serving, read_chat, chat_tokens, answer)


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue a text."""
    serving = request.app[SERVING]
    answer = TextAnswer(serving.options.model_id)
    return await _respond(request, serving, read_completion, completion_tokens, answer)


async def _respond(
    request: web.Request,
    serving: Serving,
    read: Callable[[Mapping[str, Any]], B],
    tokens: Callable[[Serving, B], list[int]],
    answer: Answer,
) -> web.StreamResponse:
    try:
        data = await _body(request)
    except GONE:
        return web.Response(status=CLIENT_GONE)
    body = await work(len(data), lambda: read(parse_object(data)))
    request[MODEL] = body.generation.model or serving.options.model_id
    check_model(serving, body.generation.model)
    prompt = await work(len(data), lambda: tokens(serving, body))
    generation = within_context(serving, prompt, body.generation)
    try:
        with serving.submitted(request, prompt, generation) as stream:
            if generation.stream:
                return await _stream(request, serving, stream, answer, prompt, generation)
            return await _whole(request, stream, answer, prompt)
    except GONE:
        return web.Response(status=CLIENT_GONE)


async def _body(request: web.Request) -> bytes:
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        text = f"The body is encoded ({encoding}); send it without a Content-Encoding."
        raise ApiError(415, text, "content_encoding")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, "The body did not come in time.", "timeout") from None


async def _follow(request: web.Request, stream: Stream, seconds: float) -> AsyncIterator[Output]:
    """The outputs, those joined that came together; an empty one after ``seconds`` of silence.

    Raises:
        ConnectionError: The client has hung up.
    """
    while True:
        outputs = await stream.take(seconds)
        if has_gone(request):
            raise ConnectionResetError("the client has hung up")
        output = _joined(stream.index, outputs)
        yield output
        if output.finish_reason is not None:
            return


def _joined(index: int, outputs: Sequence[Output]) -> Output:
    if len(outputs) == 1:
        return outputs[0]
    text = "".join(output.text for output in outputs)
    tokens = tuple(token for output in outputs for token in output.tokens)
    if not outputs:
        return Output(index)
    last = outputs[-1]
    return Output(index, text, tokens, last.finish_reason, last.error, last.cached)


async def _whole(
    request: web.Request, stream: Stream, answer: Answer, prompt: Sequence[int]
) -> web.Response:
    texts: list[str] = []
    made = 0
    async for output in _follow(request, stream, LOOK_SECONDS):
        texts.append(output.text)
        made += len(output.tokens)
        if output.finish_reason is not None:
            reason = _reason(output)
            used = usage(len(prompt), made, output.cached)
            body = answer.whole("".join(texts), reason, used)
            return web.Response(body=to_json(body), content_type="application/json")
    raise AssertionError("a stream ends with a finish reason")


async def _stream(
    request: web.Request,
    serving: Serving,
    stream: Stream,
    answer: Answer,
    prompt: Sequence[int],
    generation: Generation,
) -> web.StreamResponse:
    """Send what comes as events.

    Nothing is sent before there is something to say, so that a request which fails without a
    token still gets a status of its own; unless it takes long.
    """
    clock = asyncio.get_running_loop().time
    events = EventStream(request, serving.options.patience)
    keep_alive = serving.options.keep_alive
    made, spoken, begun = 0, clock(), False
    async for output in _follow(request, stream, min(LOOK_SECONDS, keep_alive)):
        made += len(output.tokens)
        error = output.error
        if error is not None and not events.started:
            raise error
        chunks = [] if begun else answer.opening()
        chunks += [answer.piece(output.text)] if output.text else []
        if error is not None:
            chunks.append(to_json(as_api_error(error).body()))
        elif output.finish_reason is not None:
            chunks.append(answer.last(_reason(output)))
            used = usage(len(prompt), made, output.cached)
            chunks += [answer.used(used)] if generation.include_usage else []
            chunks.append(DONE)
        elif not output.tokens:
            if clock() - spoken >= keep_alive:
                await events.comment(b"keep-alive")
                spoken = clock()
            continue
        await events.send(*chunks)
        begun, spoken = True, clock()
    await events.end()
    return events.response


def _reason(output: Output) -> str:
    """The finish reason of an answer that is an answer.

    Raises:
        MlxcelError: It is none.
    """
    if output.error is not None:
        raise output.error
    assert output.finish_reason in ("stop", "length"), output
    return output.finish_reason
