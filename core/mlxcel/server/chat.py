"""``/v1/chat/completions``, and from a conversation to a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
from aiohttp import web

from mlxcel.engine.chat_template import ChatTemplate
from mlxcel.engine.thinking import Thinking
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.server.body import read_body
from mlxcel.server.chat_answer import ChatAnswer
from mlxcel.server.chat_schema import ChatRequest, read_chat
from mlxcel.server.choice import Prompt
from mlxcel.server.errors import invalid
from mlxcel.server.fields import parse_object, quoted
from mlxcel.server.flow import respond, unless_gone
from mlxcel.server.job import Job, grammar_of
from mlxcel.server.models import MODEL, check_model
from mlxcel.server.prompts import check_biases, encode
from mlxcel.server.readers import ForcedCallReader, MarkedReader, PlainReader, Reader
from mlxcel.server.serving import SERVING, Serving
from mlxcel.server.tools import (
    Message,
    ToolFormat,
    call_schema,
    described,
    read_calls,
    read_json_calls,
)


@unless_gone
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    serving = request.app[SERVING]
    data = await read_body(request)
    body = await serving.work(len(data), lambda: read_chat(parse_object(data)))
    request[MODEL] = body.generation.model or serving.options.model_id
    check_model(serving, body.generation.model)
    job = await chat_job(serving, body, len(data))
    tokenizer = serving.backend.tokenizer
    answer = ChatAnswer(serving.options.model_id, tokenizer, body.logprobs)
    return await respond(request, serving, job, answer)


async def chat_job(serving: Serving, body: ChatRequest, size: int, prefill: str = "") -> Job:
    """What a conversation of ``size`` bytes comes down to; the answer goes on from ``prefill``.

    Raises:
        ApiError: The model has no template, or the request does not fit the model.
        ChatTemplateError: The template refuses the messages, or fails.
    """
    tools = await serving.tool_format() if body.tools else None
    has_schema = body.generation.schema is not None or bool(body.forced)
    return await serving.work(size, lambda: _job(serving, body, tools, prefill), hard=has_schema)


def chat_text(
    serving: Serving,
    body: ChatRequest,
    tools: ToolFormat | None,
    prefill: str = "",
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The conversation as the model reads it; ``tools`` says how it is told of tools.

    Raises:
        As :func:`chat_job`.
    """
    tokenizer = serving.backend.tokenizer
    template, thinking = tokenizer.template, tokenizer.thinking
    if template is None:
        text = "This model has no chat template. Send the prompt as text to /v1/completions."
        raise invalid(text, "messages", "no_chat_template")
    messages = _with_known_roles(template, body.messages)
    by_template = bool(body.tools) and tools is not None and tools.in_template
    if body.tools and not by_template:
        messages = described(messages, body.tools)
    text = tokenizer.render_chat(
        messages,
        tools=list(body.tools) if by_template else None,
        add_generation_prompt=add_generation_prompt,
        **_known_variables(template, thinking, body.variables),
    )
    # Neither a grammar nor an answer that has begun leaves room for thoughts.
    if thinking is not None and (body.forced or body.generation.schema is not None or prefill):
        text = thinking.skipped(text)
    if body.forced and tools is not None and tools.is_json:
        text += f"{tools.start}\n"
    return text + prefill


def _job(serving: Serving, body: ChatRequest, tools: ToolFormat | None, prefill: str) -> Job:
    check_biases(serving, body.generation)
    text, thinking = chat_text(serving, body, tools, prefill), serving.backend.tokenizer.thinking
    tokens = encode(serving, text, "messages", add_special_tokens=False)
    prompt = Prompt(tuple(tokens), inside=thinking is not None and thinking.opened_by(text))
    generation, grammar = body.generation, None
    if body.forced:
        grammar = grammar_of(call_schema(body.forced), "tools")
    elif generation.schema is not None:
        grammar = grammar_of(generation.schema, "response_format")
    elif tools is not None and tools.end and body.most_calls is not None:
        # The text ends with its first call.
        generation = attrs.evolve(generation, stop=(*generation.stop, tools.end))
    reader = partial(_reader, serving.backend.tokenizer, body, tools)
    return Job(generation, (prompt,), reader, grammar)


def _reader(
    tokenizer: Tokenizer, body: ChatRequest, tools: ToolFormat | None, prompt: Prompt
) -> Reader:
    if body.forced:
        return ForcedCallReader(partial(read_json_calls, body.forced))
    thinking = tokenizer.thinking if body.generation.schema is None else None
    if tools is None:
        return MarkedReader(thinking, inside=prompt.inside) if thinking else PlainReader()
    read = partial(read_calls, tools.parse, body.tools, body.most_calls)
    return MarkedReader(thinking, (tools.start, tools.end, read), inside=prompt.inside)


def _with_known_roles(template: ChatTemplate, messages: Sequence[Message]) -> Sequence[Message]:
    """A developer is the system to a template that does not know developers."""
    if "developer" in template.source:
        return messages
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def _known_variables(
    template: ChatTemplate, thinking: Thinking | None, variables: Mapping[str, Any]
) -> dict[str, Any]:
    """``variables``, all of which the template reads.

    What asks for no thoughts is granted by a model without any.

    Raises:
        ApiError: One would be ignored.
    """
    known: dict[str, Any] = {}
    for name, value in variables.items():
        if name in template.source:
            known[name] = value
        elif (name, value) == ("reasoning_effort", "none") and "enable_thinking" in template.source:
            known["enable_thinking"] = False
        elif thinking is not None or (name, value) not in _NO_THOUGHTS:
            text = f"The model's chat template does not read {quoted(name)}. Leave it out."
            raise invalid(text, name, "unsupported_parameter")
    return known


_NO_THOUGHTS = (("enable_thinking", False), ("thinking", False), ("reasoning_effort", "none"))
