"""``/tokenize`` and ``/detokenize``, as vLLM and llama.cpp have them."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from mlxcel.server.body import read_body
from mlxcel.server.chat import chat_text
from mlxcel.server.chat_schema import ChatRequest, read_messages, read_tools, read_variables
from mlxcel.server.errors import invalid
from mlxcel.server.fields import Fields, parse_object
from mlxcel.server.flow import unless_gone
from mlxcel.server.models import MODEL, check_model
from mlxcel.server.prompts import check_ids, count
from mlxcel.server.schema import Generation, read_sampling
from mlxcel.server.serving import SERVING, Serving
from mlxcel.server.unsupported import Refused, refuse_unsupported

UNSUPPORTED = {
    "chat_template": Refused((), "The model's own template is used."),
    "continue_final_message": Refused((False,)),
    "with_pieces": Refused((False,), "Send 'return_token_strs'."),
}


@unless_gone
async def tokenize(request: web.Request) -> web.StreamResponse:
    """The token ids of a ``prompt`` (or ``content``), or of ``messages`` as a prompt."""
    serving, fields, size = await _read(request)
    refuse_unsupported(fields, UNSUPPORTED)
    given = [name for name in ("prompt", "content", "messages") if fields.get(name) is not None]
    if len(given) != 1:
        text = "Send one of 'prompt', 'content' and 'messages'."
        raise invalid(text, given[-1] if given else "prompt", "invalid_value")
    [name] = given
    if name == "messages":
        tokens = await _of_messages(serving, fields, size)
    else:
        text = fields.text(name) or ""
        special = _wants_special_tokens(fields, default=name == "prompt")
        tokens = await serving.work(
            size, lambda: count(serving, text, name, add_special_tokens=special)
        )
    body: dict[str, Any] = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": serving.context_size,
    }
    if fields.flag("return_token_strs"):
        token = serving.backend.tokenizer.token
        body["token_strs"] = [token(id) or "" for id in tokens]
    return web.json_response(body)


@unless_gone
async def detokenize(request: web.Request) -> web.StreamResponse:
    """The text of token ids, special tokens included."""
    serving, fields, size = await _read(request)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not all(type(id) is int and id >= 0 for id in tokens):
        raise fields.wrong("tokens", "a list of token ids")
    check_ids(serving, tokens, "tokens")
    decode = serving.backend.tokenizer.decode
    text = await serving.work(size, lambda: decode(tokens, skip_special_tokens=False))
    return web.json_response({"prompt": text, "content": text})


async def _read(request: web.Request) -> tuple[Serving, Fields, int]:
    serving = request.app[SERVING]
    data = await read_body(request)
    fields = Fields(await serving.work(len(data), lambda: parse_object(data)))
    model = fields.text("model")
    request[MODEL] = model or serving.options.model_id
    check_model(serving, model)
    return serving, fields, len(data)


async def _of_messages(serving: Serving, fields: Fields, size: int) -> list[int]:
    tools, forced = read_tools(fields)
    generation = Generation(None, 1, read_sampling(Fields({})))
    chat = ChatRequest(
        generation, read_messages(fields), tools, forced, variables=read_variables(fields)
    )
    opening = fields.get("add_generation_prompt") is None or fields.flag("add_generation_prompt")
    form = await serving.tool_format() if tools else None
    special = _wants_special_tokens(fields, default=False)

    def work() -> list[int]:
        text = chat_text(serving, chat, form, add_generation_prompt=opening)
        return count(serving, text, "messages", add_special_tokens=special)

    return await serving.work(size, work)


def _wants_special_tokens(fields: Fields, *, default: bool) -> bool:
    for name in ("add_special_tokens", "add_special"):
        if fields.get(name) is not None:
            return fields.flag(name)
    return default
