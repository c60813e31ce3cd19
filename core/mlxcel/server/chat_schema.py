"""The body of ``/v1/chat/completions``: messages, tools and what the template is told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from mlxcel.server.errors import invalid
from mlxcel.server.fields import Fields, is_too_deep, quoted
from mlxcel.server.schema import MOST_LOGPROBS, Generation, read_generation
from mlxcel.server.tools import Message, Tool, name_of
from mlxcel.server.unsupported import Refused, refuse_unsupported

_OR_EFFORT = "Send 'enable_thinking' or 'reasoning_effort'."

UNSUPPORTED: Mapping[str, Refused] = {
    "add_special_tokens": Refused((False,), "The chat template writes them."),
    "audio": Refused(),
    "echo": Refused((False,)),
    "function_call": Refused(("none", "auto"), "Send 'tool_choice'."),
    "functions": Refused(([],), "Send 'tools'."),
    "modalities": Refused((["text"],)),
    "prediction": Refused(),
    "reasoning": Refused(({},), _OR_EFFORT),
    "stop_sequences": Refused(([],), "Send 'stop'."),
    "suffix": Refused(("",)),
    "system": Refused((), "Send a message whose role is 'system'."),
    "web_search_options": Refused(),
}
"""Fields of the chat API that would change the answer."""

_MESSAGE_UNSUPPORTED: Mapping[str, Refused] = {
    "function_call": Refused((), "Send 'tool_calls'."),
    "prefix": Refused((False,)),
}

OUR_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that a request cannot set by name."""


@attrs.frozen
class ChatRequest:
    """A conversation to go on with, in the terms of OpenAI's API.

    Attributes:
        generation: What the answer is to be like.
        messages: Contents are strings, or None beside calls; the arguments of calls are
            objects, or text that is no JSON object.
        tools: What the model may call.
        forced: The tools of which it must call one; none: it may do without.
        most_calls: Calls in one answer at most; None for any number.
        variables: Further variables of the chat template.
        logprobs: Whether the answer has log-probabilities.
    """

    generation: Generation
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    forced: tuple[Tool, ...] = ()
    most_calls: int | None = None
    variables: Mapping[str, Any] = attrs.field(factory=dict)
    logprobs: bool = False


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Check the body of a chat request.

    Raises:
        ApiError: A field is missing, is not what it must be, or asks for what is not supported.
    """
    fields = Fields(body)
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    if top and not wanted:
        text = "'top_logprobs' is only allowed where 'logprobs' is true."
        raise invalid(text, "top_logprobs", "invalid_value")
    generation = read_generation(fields, UNSUPPORTED, (top or 0) if wanted else None)
    tools, forced = read_tools(fields)
    if tools and generation.schema is not None:
        text = "'response_format' is not supported together with 'tools'. Leave one of them out."
        raise invalid(text, "response_format", "unsupported_parameter")
    several = fields.get("parallel_tool_calls") is None or fields.flag("parallel_tool_calls")
    return ChatRequest(
        generation,
        read_messages(fields),
        tools,
        forced,
        None if several else 1,
        read_variables(fields),
        wanted,
    )


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """The messages, their contents as plain text."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.wrong("messages", "a list of one message or more")
    return tuple(_read_message(message, index) for index, message in enumerate(messages))


def _read_message(message: object, index: int) -> Message:
    path = f"messages[{index}]"
    if not isinstance(message, dict):
        text = f"'{path}' must be an object, not {quoted(message)}."
        raise invalid(text, path, "invalid_value")
    fields = Fields(message, f"{path}.")
    if fields.text("role") is None:
        raise fields.wrong("role", "a string")
    for name in ("name", "tool_call_id", "reasoning_content"):
        fields.text(name)
    refuse_unsupported(fields, _MESSAGE_UNSUPPORTED)
    read = {name: message[name] for name in fields.names()}
    read["content"] = _read_content(fields)
    if fields.get("tool_calls") is not None:
        read["tool_calls"] = _read_calls(fields)
    return read


def _read_content(fields: Fields) -> str | None:
    content = fields.get("content")
    if content is None and fields.get("role") == "assistant":
        return None
    if isinstance(content, list):
        parts = enumerate(content)
        return "".join(_read_part(part, fields.path(f"content[{n}]")) for n, part in parts)
    if not isinstance(content, str):
        raise fields.wrong("content", "a string or a list of text parts")
    return content


def _read_part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid(f"'{path}' must be an object, not {quoted(part)}.", path, "invalid_value")
    fields = Fields(part, f"{path}.")
    kind = fields.get("type")
    if kind not in ("text", "refusal"):
        text = f"'{path}' is of type {quoted(kind)}; this server reads text only."
        raise invalid(text, path, "unsupported_parameter")
    if (text_of := fields.text(kind)) is None:
        raise fields.wrong(kind, "a string")
    return text_of


def _read_calls(fields: Fields) -> list[Message]:
    calls = fields.get("tool_calls")
    if not isinstance(calls, list):
        raise fields.wrong("tool_calls", "a list of calls")
    return [_read_call(call, fields.path(f"tool_calls[{n}]")) for n, call in enumerate(calls)]


def _read_call(call: object, path: str) -> Message:
    if not isinstance(call, dict):
        raise invalid(f"'{path}' must be an object, not {quoted(call)}.", path, "invalid_value")
    fields = Fields(call, f"{path}.")
    function = fields.object("function")
    if function is None:
        raise fields.wrong("function", "an object with 'name' and 'arguments'")
    if function.text("name") is None:
        raise function.wrong("name", "a string")
    given = function.get("arguments")
    if given is not None and not isinstance(given, (str, dict)):
        raise function.wrong("arguments", "a JSON object as text")
    arguments = _as_object(given)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _as_object(arguments: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """Arguments as templates want them; what is no JSON object stays as the model wrote it."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and not is_too_deep(value) else arguments


def read_tools(fields: Fields) -> tuple[tuple[Tool, ...], tuple[Tool, ...]]:
    """The tools that the model is told of, and those of which it must call one."""
    given = fields.get("tools")
    if given is not None and not isinstance(given, list):
        raise fields.wrong("tools", "a list of tools")
    tools = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(given or ()))
    choice = fields.get("tool_choice")
    if choice == "none":
        return (), ()
    if choice in (None, "auto"):
        return tools, ()
    if choice == "required":
        return tools, _some(tools)
    if not isinstance(choice, dict):
        raise fields.wrong(
            "tool_choice", "none, auto, required, or an object that names a function"
        )
    chosen = Fields(choice, "tool_choice.")
    if choice.get("type") != "function":
        text = f"'tool_choice' of type {quoted(choice.get('type'))} is not supported."
        raise invalid(f"{text} Name one function.", "tool_choice", "unsupported_parameter")
    function = chosen.object("function")
    if function is None or (name := function.text("name")) is None:
        raise invalid("'tool_choice' names no function.", "tool_choice", "invalid_value")
    return tools, named_tool(_some(tools), name)


def _some(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    if not tools:
        text = "'tool_choice' asks for a call, and there are no 'tools'."
        raise invalid(text, "tool_choice", "invalid_value")
    return tools


def named_tool(tools: Sequence[Tool], name: str) -> tuple[Tool, ...]:
    """The one tool of this name.

    Raises:
        ApiError: There is none.
    """
    found = tuple(tool for tool in tools if name_of(tool) == name)
    if not found:
        text = f"'tool_choice' names {quoted(name)}, and no tool has this name."
        raise invalid(text, "tool_choice", "invalid_value")
    return found[:1]


def _read_tool(tool: object, path: str) -> Tool:
    if not isinstance(tool, dict):
        raise invalid(f"'{path}' must be an object, not {quoted(tool)}.", path, "invalid_value")
    fields = Fields(tool, f"{path}.")
    if fields.get("type") not in (None, "function"):
        text = f"'{path}' is of type {quoted(tool.get('type'))}; only functions are supported."
        raise invalid(text, path, "unsupported_parameter")
    function = fields.object("function")
    if function is None:
        raise fields.wrong("function", "an object with a 'name'")
    if not function.text("name"):
        raise function.wrong("name", "a string that is not empty")
    function.text("description")
    function.object("parameters")
    return {**tool, "type": "function"}


def _thinks(thinking: Fields) -> bool:
    """What GLM's and DeepSeek's clients say: ``{"type": "disabled"}``."""
    refuse_unsupported(thinking, dict.fromkeys({*thinking.names()} - {"type"}, Refused()))
    wanted = {"enabled": True, "disabled": False}
    kind = thinking.text("type")
    if kind not in wanted:
        raise thinking.wrong("type", "'enabled' or 'disabled'")
    return wanted[kind]


def read_variables(fields: Fields) -> dict[str, Any]:
    """What the request tells the chat template beside messages and tools."""
    variables: dict[str, Any] = {}
    if (effort := fields.text("reasoning_effort")) is not None:
        variables["reasoning_effort"] = effort
    if thinking := fields.object("thinking"):
        variables["enable_thinking"] = _thinks(thinking)
    if fields.get("enable_thinking") is not None:
        variables["enable_thinking"] = fields.flag("enable_thinking")
    given = fields.object("chat_template_kwargs") or Fields({})
    for name in given.names():
        value, path = given.get(name), f"chat_template_kwargs.{name}"
        if name in OUR_VARIABLES or name.startswith("_") or not name.isidentifier():
            text = f"'{path}' cannot be set. The request's own fields say it."
            raise invalid(text, path, "invalid_value")
        if not isinstance(value, (str, int, float, bool)):
            text = f"'{path}' must be a string, a number, true or false, not {quoted(value)}."
            raise invalid(text, path, "invalid_value")
        variables[name] = value
    return variables
