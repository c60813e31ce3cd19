"""Tools: what a model is told of them, and how its calls are read.

Most models that know tools have a format of their own: their chat template takes the list of
tools, and mlx-lm has a reader for their calls. Other models are told of the tools in the
system message, with the format that most models have seen: a JSON object between marks.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.server.errors import invalid
from mlxcel.server.fields import quoted
from mlxcel.server.parts import ToolCall

Tool = Mapping[str, Any]
"""A tool as OpenAI's API has it: ``{"type": "function", "function": {"name": …, …}}``."""

Message = Mapping[str, Any]


@attrs.frozen
class ToolFormat:
    """How one model writes calls.

    Attributes:
        start, end: The marks around a call.
        parse: From what stands between, and the tools, to a call or a list of calls.
        in_template: Whether the chat template tells the model of the tools.
        is_json: Whether a call is a JSON object with ``name`` and ``arguments``.
    """

    start: str
    end: str
    parse: Callable[[str, Any], Any]
    in_template: bool
    is_json: bool


DESCRIBED = ToolFormat(
    "<tool_call>", "</tool_call>", lambda text, tools: json.loads(text), False, True
)
"""The format of models that have none of their own."""

JSON_FORMAT = "json_tools"
"""mlx-lm's name of the format whose calls are JSON objects."""


def find_tool_format(tokenizer: Tokenizer) -> ToolFormat:
    """The format of the model's own, or else :data:`DESCRIBED`.

    Takes seconds if the chat template knows tools, since mlx-lm is imported then.
    """
    template = tokenizer.template
    if template is None or "tools" not in template.source:
        return DESCRIBED
    from mlxcel.compat import find_tool_parser

    parser = find_tool_parser(Path(tokenizer.path), template.source, tokenizer.backend.get_vocab())
    if parser is None:
        return DESCRIBED
    is_json = parser.name == JSON_FORMAT
    return ToolFormat(parser.start, parser.end, parser.parse, True, is_json)


def name_of(tool: Tool) -> str:
    """The name by which a tool is called."""
    return str(tool["function"]["name"])


def read_calls(
    parse: Callable[[str, Any], Any], tools: Sequence[Tool], most: int | None, text: str
) -> list[ToolCall] | None:
    """The calls that ``text`` spells, ``most`` of them at most; None if it spells none.

    A call of something that is no tool is none.
    """
    try:
        parsed = parse(text, list(tools))
        calls = [_to_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
    except Exception:  # the parsers of mlx-lm raise what their faults happen to raise
        return None
    names = {name_of(tool) for tool in tools}
    if not calls or not all(call.name in names for call in calls):
        return None
    return calls[:most]


def read_json_calls(tools: Sequence[Tool], text: str) -> list[ToolCall] | None:
    """As :func:`read_calls`, for a call that is a JSON object."""
    return read_calls(lambda text, tools: json.loads(text), tools, None, text)


def _to_call(parsed: Any) -> ToolCall:
    """A parser's call as the API has it; raises whatever shows that it is none."""
    arguments = parsed.get("arguments", parsed.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict) or not isinstance(parsed["name"], str):
        raise ValueError("not a call")
    own = parsed.get("id")
    id = own if isinstance(own, str) and own else f"call_{secrets.token_hex(12)}"
    return ToolCall(id, parsed["name"], json.dumps(arguments, ensure_ascii=False))


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON schema of one call of one of ``tools``.

    Raises:
        ApiError: The arguments of one could be no object, which no call could be read from.
    """
    schemas = {f"tool{i}": _arguments_schema(tool, i) for i, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name_of(tool)},
                "arguments": {"$ref": f"#/$defs/tool{index}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    return {"$defs": schemas, **(calls[0] if len(calls) == 1 else {"anyOf": calls})}


def _arguments_schema(tool: Tool, index: int) -> Any:
    """The schema of a tool's arguments, to stand under ``#/$defs`` of a larger one."""
    schema = tool["function"].get("parameters") or {}
    kind = schema.get("type") or "object"
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        text = f"The arguments of {quoted(name_of(tool))} must be an object, not {quoted(kind)}."
        raise invalid(text, "tools", "unsupported_schema")
    return _moved({**schema, "type": "object"}, f"#/$defs/tool{index}")


def _moved(schema: Any, root: str) -> Any:
    """``schema`` with its references to its own root leading to ``root``."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, root) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference.removeprefix("#")
    return moved


# For models whose template does not know tools.


def described(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """``messages`` in which the system message tells of ``tools``, and calls are text."""
    plain = [_as_text(message) for message in messages]
    text = _description(tools)
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content'] or ''}\n\n{text}".lstrip()}
        return [first, *_joined(plain[1:])]
    return [{"role": "system", "content": text}, *_joined(plain)]


def _description(tools: Sequence[Tool]) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. Each of these lines describes one, with a JSON schema of its "
        f"arguments:\n\n{functions}\n\n"
        "To call a function, write its name and arguments as a JSON object between these marks:\n\n"
        f"{DESCRIBED.start}\n"
        '{"name": "the function\'s name", "arguments": {"an argument": "its value"}}\n'
        f"{DESCRIBED.end}\n\n"
        "The result comes with the next message. If no function helps, answer as usual."
    )


def _as_text(message: Message) -> dict[str, Any]:
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    if message["role"] == "tool":
        result = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        return {"role": "user", "content": result}
    calls = message.get("tool_calls")
    if calls:
        texts = [_call_text(call["function"]) for call in calls]
        content = message.get("content")
        plain["content"] = "\n".join([*([content] if content else []), *texts])
    return plain


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments", {})}
    return f"{DESCRIBED.start}\n{json.dumps(call, ensure_ascii=False)}\n{DESCRIBED.end}"


def _joined(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Templates want roles to alternate: what one role says in a row becomes one message."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if joined and message["role"] == "user" == joined[-1]["role"]:
            both = [str(m.get("content") or "") for m in (joined[-1], message)]
            joined[-1] = {**joined[-1], "content": "\n".join(both)}
        else:
            joined.append(message)
    return list(joined)
