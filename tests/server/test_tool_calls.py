"""Tools over HTTP: what the model is told, and how its calls come back."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import attrs
import pytest

from mlxcel.engine.chat_template import ChatTemplate
from mlxcel.engine.tokenizer import Tokenizer

Served = Callable[..., AbstractAsyncContextManager[Any]]
CHAT = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock"}},
]
ASK = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER = ("weather", {"city": "Oslo"})


@pytest.fixture
def caller(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer whose template knows tools, and whose calls are JSON."""
    source = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
        "{% for tool_call in m.tool_calls or [] %}<tool_call>"
        "{{ tool_call.function.arguments.city }}{# tool_call.name #}{% endfor %}{% endfor %}"
    )
    return attrs.evolve(tokenizer, template=ChatTemplate(source, Path("here")))


async def choice_of(client: Any, **fields: Any) -> dict[str, Any]:
    status, body = await client.post(CHAT, {**ASK, **fields})
    assert status == 200, body
    [choice] = body["choices"]
    found: dict[str, Any] = choice
    return found


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", [])
    ]


async def streamed(client: Any, **fields: Any) -> tuple[list[Any], str, str]:
    """The calls, the content and the finish reason of a stream."""
    chunks = await client.chunks(CHAT, {**ASK, **fields})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert all(call["type"] == "function" and call["id"] for call in calls)
    [reason] = [c["finish_reason"] for c in choices if c["finish_reason"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return calls_of({"tool_calls": calls}), text, reason


async def test_a_call(served: Served, caller: Tokenizer) -> None:
    """A call is no text: content is null, and the finish reason says tool_calls."""
    async with served(CALL, using=caller) as client:
        choice = await choice_of(client)
        assert calls_of(choice["message"]) == [WEATHER]
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
        assert await streamed(client) == ([WEATHER], "", "tool_calls")
        prompt = bytes(client.backend.requests[0].prompt).decode()
        assert prompt == "[weather][clock]<user>hi"


async def test_text_before_a_call(served: Served, caller: Tokenizer) -> None:
    """Text before a call streams as it comes; two calls are two."""
    answer = f'I look.{CALL}\n<tool_call>{{"name": "clock", "arguments": {{}}}}</tool_call>'
    async with served(answer, using=caller) as client:
        choice = await choice_of(client)
        assert choice["message"]["content"] == "I look."
        assert calls_of(choice["message"]) == [WEATHER, ("clock", {})]
        assert await streamed(client) == ([WEATHER, ("clock", {})], "I look.", "tool_calls")


@pytest.mark.parametrize(
    "answer",
    [
        "<tool_call>{broken</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "just text with < and <tool",
    ],
)
async def test_what_is_no_call_is_content(served: Served, caller: Tokenizer, answer: str) -> None:
    """A malformed call is not lost: it comes as content."""
    async with served(answer, using=caller) as client:
        choice = await choice_of(client)
        assert choice["message"] == {"role": "assistant", "content": answer}
        assert choice["finish_reason"] == "stop"
        assert await streamed(client) == ([], answer, "stop")


async def test_a_call_that_was_cut(served: Served, caller: Tokenizer) -> None:
    """A call cut by max_tokens is content, and the finish reason stays length."""
    async with served(CALL, using=caller) as client:
        choice = await choice_of(client, max_tokens=30)
        assert choice["message"]["content"] == CALL[:30]
        assert choice["finish_reason"] == "length"
        assert await streamed(client, max_tokens=30) == ([], CALL[:30], "length")


async def test_one_call_only(served: Served, caller: Tokenizer) -> None:
    """Without parallel calls the text ends with its first call."""
    async with served(CALL * 2, using=caller) as client:
        choice = await choice_of(client, parallel_tool_calls=False)
        assert calls_of(choice["message"]) == [WEATHER]
        assert choice["finish_reason"] == "tool_calls"
        assert client.backend.requests[0].stop == ("</tool_call>",)


async def test_none_means_no_tools(served: Served, caller: Tokenizer) -> None:
    """With tool_choice none the model is not told, and what it writes is text."""
    async with served(CALL, using=caller) as client:
        choice = await choice_of(client, tool_choice="none")
        assert choice["message"]["content"] == CALL
        assert bytes(client.backend.requests[0].prompt) == b"<user>hi"


FORCED = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
async def test_a_forced_call(served: Served, caller: Tokenizer, choice: object) -> None:
    """A grammar holds the model to a call; the prompt begins it."""
    async with served(FORCED, using=caller) as client:
        found = await choice_of(client, tool_choice=choice)
        assert calls_of(found["message"]) == [WEATHER]
        assert found["finish_reason"] == "tool_calls"
        assert await streamed(client, tool_choice=choice) == ([WEATHER], "", "tool_calls")
        request = client.backend.requests[0]
        assert bytes(request.prompt).endswith(b"<user>hi<tool_call>\n")
        assert ("clock" in request.grammar) == (choice == "required")
        cut = await choice_of(client, tool_choice=choice, max_tokens=12)
        assert (cut["message"]["content"], cut["finish_reason"]) == (FORCED[:12], "length")


async def test_a_model_that_knows_no_tools(served: Served) -> None:
    """Its system message tells it of them, and its calls are read all the same."""
    async with served(CALL, context=4096) as client:
        assert calls_of((await choice_of(client))["message"]) == [WEATHER]
        prompt = bytes(token for token in client.backend.requests[0].prompt if token < 256)
        for tool in TOOLS:
            assert json.dumps(tool["function"]).encode() in prompt


async def test_a_conversation_with_calls(served: Served, caller: Tokenizer) -> None:
    """Earlier calls and their results are the template's to show, arguments as objects."""
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "weather", "arguments": '{"city": "Oslo"}'}  # type: ignore[assignment]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    async with served(using=caller) as client:
        await choice_of(client, messages=messages)
        prompt = bytes(client.backend.requests[0].prompt).decode()
        assert prompt == "[weather][clock]<user>Weather?<assistant><tool_call>Oslo<tool>rain"


async def test_a_schema_that_cannot_be(served: Served, caller: Tokenizer) -> None:
    """Where a call must follow a schema that means nothing, the field is named."""
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    async with served(using=caller) as client:
        status, body = await client.post(
            CHAT, {**ASK, "tools": [broken], "tool_choice": "required"}
        )
        assert (status, body["error"]["param"]) == (400, "tools")
        assert (await client.post(CHAT, {**ASK, "tools": [broken]}))[0] == 200


async def test_a_tiny_model_must_call(tiny_served: Served) -> None:
    """A model that knows nothing calls the function that it must, with the right arguments."""
    enum = {"type": "string", "enum": ["Oslo", "Rome"]}
    parameters = {**PARAMETERS, "properties": {"city": enum}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    async with tiny_served() as client:
        body = {**ASK, "tools": [tool], "tool_choice": "required", "max_tokens": 200}
        status, made = await client.post(CHAT, body)
        assert status == 200, made
        [(name, arguments)] = calls_of(made["choices"][0]["message"])
        assert name == "weather"
        assert arguments["city"] in enum["enum"]
