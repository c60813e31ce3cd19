"""The body of Anthropic's ``/v1/messages``, read into the terms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs

from mlxcel.server.chat_schema import ChatRequest, named_tool
from mlxcel.server.errors import invalid
from mlxcel.server.fields import Fields, quoted
from mlxcel.server.schema import MOST_TOKENS, Generation, read_sampling, read_seed, read_stop
from mlxcel.server.tools import Message, Tool
from mlxcel.server.unsupported import UNSUPPORTED, Refused, refuse_unsupported

_BY_THINKING = "Send 'thinking'."

MESSAGES_UNSUPPORTED: Mapping[str, Refused] = {
    **UNSUPPORTED,
    "add_special_tokens": Refused((False,), "The chat template writes them."),
    "best_of": Refused((1,), "Send several requests."),
    "chat_template_kwargs": Refused(({},), _BY_THINKING),
    "container": Refused(),
    "context_management": Refused(),
    "enable_thinking": Refused((False,), _BY_THINKING),
    "functions": Refused(([],), "Send 'tools'."),
    "ignore_eos": Refused((False,)),
    "logprobs": Refused((False,)),
    "max_completion_tokens": Refused((), "Send 'max_tokens'."),
    "mcp_servers": Refused(([],)),
    "n": Refused((1,), "Send several requests."),
    "output_config": Refused(({},)),
    "output_format": Refused(),
    "parallel_tool_calls": Refused((True,), "Send 'tool_choice' with 'disable_parallel_tool_use'."),
    "reasoning": Refused(({},), _BY_THINKING),
    "reasoning_effort": Refused(("none",), _BY_THINKING),
    "response_format": Refused((), "Send it to /v1/chat/completions."),
    "stop": Refused(([],), "Send 'stop_sequences'."),
    "top_logprobs": Refused((0,)),
}
"""Fields that would change the answer."""

Thinking = Literal["enabled", "adaptive", "disabled"]


@attrs.frozen
class MessagesRequest:
    """A conversation and whether the model shall think; ``prefill`` begins its answer."""

    chat: ChatRequest
    thinking: Thinking
    prefill: str


def read_messages_request(body: Mapping[str, Any], *, counting: bool = False) -> MessagesRequest:
    """Check the body of a request.

    Args:
        body: The body.
        counting: Whether only its tokens are counted, which needs no ``max_tokens``.

    Raises:
        ApiError: A field is missing, is not what it must be, or asks for what is not supported.
    """
    fields = Fields(body)
    refuse_unsupported(fields, MESSAGES_UNSUPPORTED)
    max_tokens = fields.integer("max_tokens", 1, MOST_TOKENS)
    if max_tokens is None and not counting:
        raise fields.wrong("max_tokens", f"an integer from 1 to {MOST_TOKENS}")
    tools, forced, most_calls = _read_tools(fields)
    messages = [*_read_system(fields), *_read_turns(fields)]
    last = messages[-1]
    prefill = ""
    if last["role"] == "assistant":
        if last.get("tool_calls") or forced:
            text = "The last message is the assistant's; a call cannot be gone on with."
            raise invalid(text, "messages", "invalid_value")
        prefill = str(messages.pop()["content"] or "")
    generation = Generation(
        model=fields.text("model"),
        max_tokens=max_tokens or 1,
        sampling=read_sampling(fields),
        seeded=read_seed(fields) is not None,
        stop=read_stop(fields, "stop_sequences"),
        stream=fields.flag("stream"),
    )
    chat = ChatRequest(generation, tuple(messages), tools, forced, most_calls)
    return MessagesRequest(chat, _read_thinking(fields), prefill)


def _read_thinking(fields: Fields) -> Thinking:
    given = fields.object("thinking")
    if given is None:
        return "disabled"
    match given.text("type"):
        case "enabled":
            given.integer("budget_tokens", 1, MOST_TOKENS)
            return "enabled"
        case "adaptive":
            return "adaptive"
        case "disabled":
            return "disabled"
    raise given.wrong("type", "enabled, adaptive or disabled")


def _read_system(fields: Fields) -> Iterator[Message]:
    system = fields.get("system")
    if isinstance(system, str):
        yield {"role": "system", "content": system}
    elif isinstance(system, list):
        blocks = [_block(block, f"system[{index}]") for index, block in enumerate(system)]
        yield {"role": "system", "content": "\n".join(_text(block) for block in blocks)}
    elif system is not None:
        raise fields.wrong("system", "a string or a list of text blocks")


def _read_turns(fields: Fields) -> list[Message]:
    turns = fields.get("messages")
    if not isinstance(turns, list) or not turns:
        raise fields.wrong("messages", "a list of one message or more")
    return [
        message for n, turn in enumerate(turns) for message in _read_turn(turn, f"messages[{n}]")
    ]


def _read_turn(turn: object, path: str) -> list[Message]:
    """What one message of Anthropic's is in OpenAI's terms: results of tools go first."""
    if not isinstance(turn, dict):
        raise invalid(f"'{path}' must be an object, not {quoted(turn)}.", path, "invalid_value")
    fields = Fields(turn, f"{path}.")
    role, content = fields.text("role"), fields.get("content")
    if role not in ("user", "assistant"):
        raise fields.wrong("role", "user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise fields.wrong("content", "a string or a list of blocks")
    blocks = [_block(block, fields.path(f"content[{n}]")) for n, block in enumerate(content)]
    return _assistant(blocks) if role == "assistant" else _user(blocks)


def _user(blocks: list[Fields]) -> list[Message]:
    results = [_tool_result(block) for block in blocks if block.get("type") == "tool_result"]
    texts = [_text(block) for block in blocks if block.get("type") != "tool_result"]
    said = [{"role": "user", "content": "".join(texts)}] if texts or not results else []
    return [*results, *said]


def _assistant(blocks: list[Fields]) -> list[Message]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(block.text("thinking") or "")
            case "tool_use":
                calls.append(_tool_use(block))
            case _:
                texts.append(_text(block))
    if texts:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _block(block: object, path: str) -> Fields:
    if not isinstance(block, dict):
        raise invalid(f"'{path}' must be an object, not {quoted(block)}.", path, "invalid_value")
    return Fields(block, f"{path}.")


def _text(block: Fields) -> str:
    if block.get("type") != "text":
        path = block.path("type")
        text = f"'{path}' is {quoted(block.get('type'))}, which this server does not read here."
        raise invalid(text, path, "unsupported_parameter")
    if (text_of := block.text("text")) is None:
        raise block.wrong("text", "a string")
    return text_of


def _tool_use(block: Fields) -> Message:
    name, given = block.text("name"), block.object("input")
    if name is None or given is None:
        raise block.wrong("name" if name is None else "input", "a string, and 'input' an object")
    function = {"name": name, "arguments": block.get("input")}
    return {"id": block.text("id"), "type": "function", "function": function}


def _tool_result(block: Fields) -> Message:
    content = block.get("content")
    if isinstance(content, list):
        inner = [_block(part, block.path(f"content[{n}]")) for n, part in enumerate(content)]
        content = "".join(map(_text, inner))
    elif content is not None and not isinstance(content, str):
        raise block.wrong("content", "a string or a list of text blocks")
    if block.flag("is_error"):  # no template has a place for this
        content = f"Error: {content}" if content else "Error"
    return {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": content or ""}


def _read_tools(fields: Fields) -> tuple[tuple[Tool, ...], tuple[Tool, ...], int | None]:
    """The tools, those of which one must be called, and how many calls there may be."""
    given = fields.get("tools")
    if given is not None and not isinstance(given, list):
        raise fields.wrong("tools", "a list of tools")
    tools = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(given or ()))
    choice = fields.object("tool_choice")
    if choice is None:
        return tools, (), None
    most = 1 if choice.flag("disable_parallel_tool_use") else None
    kind = choice.text("type")
    if kind in ("any", "tool") and not tools:
        text = "'tool_choice' asks for a call, and there are no 'tools'."
        raise invalid(text, "tool_choice", "invalid_value")
    match kind:
        case "auto":
            return tools, (), most
        case "none":
            return (), (), most
        case "any":
            return tools, tools, most
        case "tool":
            return tools, named_tool(tools, choice.text("name") or ""), most
    raise choice.wrong("type", "auto, any, tool or none")


def _read_tool(tool: object, path: str) -> Tool:
    fields = _block(tool, path)
    if fields.get("type") not in (None, "custom"):
        text = (
            f"'{path}' is of type {quoted(fields.get('type'))}; only your own tools can be called."
        )
        raise invalid(text, path, "unsupported_parameter")
    if not (name := fields.text("name")):
        raise fields.wrong("name", "a string that is not empty")
    if fields.object("input_schema") is None:
        raise fields.wrong("input_schema", "a JSON schema")
    function = {
        "name": name,
        "description": fields.text("description") or "",
        "parameters": fields.get("input_schema"),
    }
    return {"type": "function", "function": function}
