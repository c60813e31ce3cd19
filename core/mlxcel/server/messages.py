"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Any

import attrs
from aiohttp import web

from mlxcel.server.body import read_body
from mlxcel.server.chat import chat_job, chat_text
from mlxcel.server.chat_schema import ChatRequest
from mlxcel.server.errors import invalid
from mlxcel.server.fields import parse_object
from mlxcel.server.flow import respond, unless_gone
from mlxcel.server.messages_answer import MessagesAnswer
from mlxcel.server.messages_schema import MessagesRequest, read_messages_request
from mlxcel.server.models import MODEL, check_model
from mlxcel.server.prompts import count
from mlxcel.server.serving import SERVING, Serving

PATH = "/v1/messages"

SWITCH = "enable_thinking"
"""The variable by which templates are told whether to think."""


@unless_gone
async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    serving, body, size = await _read(request, counting=False)
    job = await chat_job(serving, _with_thinking(serving, body), size, body.prefill)
    stops = body.chat.generation.stop
    answer = MessagesAnswer(serving.options.model_id, serving.backend.tokenizer, stops)
    return await respond(request, serving, job, answer)


@unless_gone
async def count_tokens(request: web.Request) -> web.StreamResponse:
    """How many tokens a conversation has as a prompt."""
    serving, body, size = await _read(request, counting=True)
    chat = _with_thinking(serving, body)
    tools = await serving.tool_format() if chat.tools else None

    def work() -> int:
        text = chat_text(serving, chat, tools, body.prefill)
        return len(count(serving, text, "messages", add_special_tokens=False))

    return web.json_response({"input_tokens": await serving.work(size, work)})


async def _read(request: web.Request, *, counting: bool) -> tuple[Serving, MessagesRequest, int]:
    serving = request.app[SERVING]
    data = await read_body(request)

    def read() -> MessagesRequest:
        return read_messages_request(parse_object(data), counting=counting)

    body = await serving.work(len(data), read)
    request[MODEL] = body.chat.generation.model or serving.options.model_id
    check_model(serving, body.chat.generation.model)
    return serving, body, len(data)


def _with_thinking(serving: Serving, body: MessagesRequest) -> ChatRequest:
    """The conversation, its template told whether to think.

    Raises:
        ApiError: The model is to think and cannot.
    """
    tokenizer = serving.backend.tokenizer
    if body.thinking == "enabled" and tokenizer.thinking is None:
        text = "This model does not think. Leave 'thinking' out."
        raise invalid(text, "thinking", "unsupported_parameter")
    has_switch = tokenizer.template is not None and SWITCH in tokenizer.template.source
    variables: dict[str, Any] = {}
    if has_switch and body.thinking != "adaptive":
        variables[SWITCH] = body.thinking == "enabled"
    return attrs.evolve(body.chat, variables=variables)
