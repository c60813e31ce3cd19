"""What models are told of tools, and what their calls are read as."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

from mlxcel import compat
from mlxcel.engine.chat_template import ChatTemplate
from mlxcel.engine.thinking import STRUCTURE
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.server.errors import ApiError
from mlxcel.server.parts import ToolCall
from mlxcel.server.tools import (
    DESCRIBED,
    call_schema,
    described,
    find_tool_format,
    read_calls,
    read_json_calls,
)


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("weather", city={"type": "string"}), tool("add", a={"type": "integer"})]
TEMPLATES = {
    "json_tools": "{% if tools %}{% endif %}<tool_call>{{ tool_call.name }}",
    "qwen3_coder": "{% if tools %}{% endif %}<tool_call>\n<function=",
    "mistral": "{% if tools %}{% endif %}[TOOL_CALLS]",
    "glm47": "{% if tools %}{% endif %}<tool_call><arg_key>",
    "gemma4": "{% if tools %}{% endif %}<|tool_call><tool_call|>",
    "kimi_k2": "{% if tools %}{% endif %}<|tool_calls_section_begin|>",
    "minimax_m2": "{% if tools %}{% endif %}<minimax:tool_call>",
}
CALLS = {
    "json_tools": '\n{"name": "weather", "arguments": {"city": "Oslo"}}\n',
    "qwen3_coder": "\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>",
    "mistral": '[{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "glm47": "weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>",
    "gemma4": 'call:weather{city:<|"|>Oslo<|"|>}',
    "kimi_k2": "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|>',
    "minimax_m2": '<invoke name="weather"><parameter name="city">Oslo</parameter></invoke>',
}


def with_template(tokenizer: Tokenizer, source: str) -> Tokenizer:
    return attrs.evolve(tokenizer, template=ChatTemplate(source, Path("here")))


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_each_template_has_its_format(tokenizer: Tokenizer, name: str) -> None:
    """The format is the one that mlx-lm takes for the template, and reads a call of it."""
    form = find_tool_format(with_template(tokenizer, TEMPLATES[name]))
    assert form.in_template
    assert form.is_json == (name == "json_tools")
    [call] = read_calls(form.parse, TOOLS, None, CALLS[name]) or []
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})


@pytest.mark.parametrize("source", ["no such thing", "{% if tools %}{% endif %}"])
def test_other_models_are_told_in_words(tokenizer: Tokenizer, source: str) -> None:
    """Without tools in the template, or with a format nobody knows, tools are described."""
    assert find_tool_format(with_template(tokenizer, source)) is DESCRIBED
    assert find_tool_format(attrs.evolve(tokenizer, template=None)) is DESCRIBED


@pytest.mark.parametrize("named", ["mistral", "no_such_parser", "../../evil", 5])
def test_a_checkpoint_may_name_its_format(tmp_path: Path, named: object) -> None:
    """tokenizer_config.json goes before the template; what mlx-lm does not have is none."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tool_parser_type": named}))
    found = compat.find_tool_parser(tmp_path, TEMPLATES["json_tools"], {})
    assert (found.name if found else None) == ("mistral" if named == "mistral" else None)


def test_all_marks_of_calls_are_text() -> None:
    """Marks that are special tokens somewhere are shown, or no call could be found."""
    words = ("<tool_call>", "<function name=", "</function>")
    for source in TEMPLATES.values():
        parser = compat.find_tool_parser(Path("nowhere"), source, {})
        assert parser is not None
        for mark in (parser.start, parser.end):
            assert mark in STRUCTURE or mark in words or not mark


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no call",
        "{}",
        "[]",
        "5",
        '{"name": "weather"',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": "Oslo"}',
        '{"name": 5, "arguments": {}}',
        '{"name": "unknown", "arguments": {}}',
        '[{"name": "weather", "arguments": {}}, {"name": "unknown", "arguments": {}}]',
    ],
)
def test_what_is_no_call(text: str) -> None:
    """Bad JSON, a name that no tool has, arguments that are no object: none of it is a call."""
    assert read_json_calls(TOOLS, text) is None


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "weather", "arguments": {"city": "Zürich"}}', '{"city": "Zürich"}'),
        ('{"name": "weather", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "weather", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "weather"}', "{}"),
    ],
)
def test_forms_of_calls(text: str, arguments: str) -> None:
    """What models write in place of the right form is understood where it is clear."""
    [call] = read_json_calls(TOOLS, text) or []
    assert call == ToolCall(call.id, "weather", arguments)
    assert call.id.startswith("call_")


def test_several_calls() -> None:
    """A list is several calls, of which only so many are taken; ids of the model's stay."""
    text = json.dumps([{"id": f"id{n}", "name": "add", "arguments": {"a": n}} for n in range(3)])
    parse: Callable[[str, Any], Any] = lambda text, tools: json.loads(text)  # noqa: E731
    read = partial(read_calls, parse, TOOLS)
    assert [call.id for call in read(None, text) or []] == ["id0", "id1", "id2"]
    assert [call.id for call in read(1, text) or []] == ["id0"]


def test_the_schema_of_a_call() -> None:
    """References inside a tool's own schema still lead into it."""
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    linked = tool("link", head={"$ref": "#/$defs/node"})
    linked["function"]["parameters"]["$defs"] = {"node": node}
    schema = call_schema([*TOOLS, linked, {"function": {"name": "bare"}}])
    assert [c["properties"]["name"] for c in schema["anyOf"]] == [
        {"const": name} for name in ("weather", "add", "link", "bare")
    ]
    moved = schema["$defs"]["tool2"]
    assert moved["properties"]["head"]["$ref"] == "#/$defs/tool2/$defs/node"
    inner = moved["$defs"]["node"]["properties"]["next"]
    assert inner["$ref"] == "#/$defs/tool2/$defs/node"
    assert schema["$defs"]["tool3"] == {"type": "object"}
    assert "anyOf" not in call_schema(TOOLS[:1])


def test_forced_arguments_are_objects() -> None:
    """A call is held to arguments with names: other types are left out, or refused if alone."""
    loose = {"function": {"name": "f", "parameters": {"type": ["null", "object"]}}}
    schema = call_schema([loose])
    assert schema["$defs"]["tool0"] == {"type": "object"}
    for kind in ("string", ["null", "array"], "nonsense", True):
        with pytest.raises(ApiError, match='arguments of "f" must be an object') as caught:
            call_schema([{"function": {"name": "f", "parameters": {"type": kind}}}])
        assert caught.value.param == "tools"


def test_conversations_with_tools_in_words() -> None:
    """The system message tells of the tools; calls and results become text, in turns."""
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": "snow"},
    ]
    system, user, assistant, results = described(messages, TOOLS)
    assert system["content"].startswith("Be brief.\n\n")
    for each in TOOLS:
        assert json.dumps(each["function"]) in system["content"]
    assert user == messages[1]
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": f"{text}\n{text}"}
    assert results["role"] == "user"
    assert [line for line in results["content"].split("\n") if "<" not in line] == ["rain", "snow"]
    first, _ = described(messages[1:2], TOOLS)
    assert first["role"] == "system"
