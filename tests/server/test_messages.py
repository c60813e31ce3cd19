"""Anthropic's messages: the same model in another API."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import attrs
import pytest

from mlxcel.engine.chat_template import ChatTemplate
from mlxcel.engine.thinking import Thinking
from mlxcel.engine.tokenizer import Tokenizer

Served = Callable[..., AbstractAsyncContextManager[Any]]
PATH = "/v1/messages"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
PLAIN = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{{ m.reasoning_content }}"
    "{% for tool_call in m.tool_calls or [] %}{{ tool_call.function | tojson }}"
    "{# <tool_call> tool_call.name #}{% endfor %}{% endfor %}"
)


@pytest.fixture
def plain(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer whose template shows all there is."""
    return attrs.evolve(tokenizer, template=ChatTemplate(PLAIN, Path("here")))


async def message_of(client: Any, **fields: Any) -> dict[str, Any]:
    status, body = await client.post(PATH, {**HI, **fields})
    assert status == 200, body
    found: dict[str, Any] = body
    return found


async def events_of(client: Any, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of all events, whose types are their names."""
    async with client.session.post(PATH, json={**HI, **fields, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = (await response.read()).decode("ascii")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert events[-1][1].pop("type") == events[-1][0]
    return events


def message_from(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The message that a client puts together from the events."""
    message: dict[str, Any] = {}
    texts = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    for name, data in events:
        match name:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                assert data["index"] == len(message["content"])
                message["content"].append({**data["content_block"], "json": ""})
            case "content_block_delta":
                assert data["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], dict(data["delta"])
                kind = delta.pop("type")
                [value] = delta.values()
                block["json" if kind == "input_json_delta" else texts[kind]] += value
            case "content_block_stop":
                block = message["content"][data["index"]]
                if (text := block.pop("json")) != "":
                    block["input"] = json.loads(text)
            case "message_delta":
                message |= data["delta"]
                message["usage"] |= data["usage"]
            case other:
                assert other in ("ping", "message_stop")
    return message


async def test_a_message(served: Served) -> None:
    """Text comes as one block, whole and streamed."""
    async with served("hello") as client:
        message = await message_of(client)
        assert message.pop("id").startswith("msg_")
        assert message == {
            "type": "message",
            "role": "assistant",
            "model": "tiny",
            "content": [{"type": "text", "text": "hello"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 6, "output_tokens": 5},
        }
        events = await events_of(client)
        names = [name for name, _ in events]
        assert names[:3] == ["message_start", "ping", "content_block_start"]
        assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(names[3:-3]) == {"content_block_delta"}
        streamed = message_from(events)
        assert {**streamed, "id": None} == {**message, "id": None}


@pytest.mark.parametrize(
    ("answer", "fields", "reason", "sequence", "text"),
    [
        ("hello", {"max_tokens": 3}, "max_tokens", None, "hel"),
        ("hello", {"stop_sequences": ["l"]}, "stop_sequence", "l", "he"),
        ("hello", {"stop_sequences": ["lo", "llo", "x"]}, "stop_sequence", "llo", "he"),
        ("hello", {"stop_sequences": ["x"]}, "end_turn", None, "hello"),
    ],
)
async def test_why_it_ended(
    served: Served, answer: str, fields: dict[str, Any], reason: str, sequence: object, text: str
) -> None:
    """The reason names the string of the client's, if it was one."""
    async with served(answer) as client:
        for message in (
            await message_of(client, **fields),
            message_from(await events_of(client, **fields)),
        ):
            assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
            assert [block["text"] for block in message["content"]] == [text]


async def test_a_conversation(served: Served, plain: Tokenizer) -> None:
    """System, blocks, calls and their results become what the template knows."""
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
    part = {"type": "text", "text": "rain"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [part]}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "look"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    system = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
    async with served(using=plain) as client:
        await message_of(client, messages=messages, system=system, tools=TOOLS)
        await message_of(client, system="be good")
        first, second = (bytes(r.prompt).decode() for r in client.backend.requests)
        call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
        turns = f"<system>s<user>ab<assistant>lookhm{call}<tool>rain<user>and?"
        assert first == f"[weather]{turns}"
        assert second == "<system>be good<user>hi"


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ({"content": "no such city"}, "no such city"),
        ({"content": "no such city", "is_error": True}, "Error: no such city"),
        ({"content": "4 degrees", "is_error": False}, "4 degrees"),
        ({"is_error": True}, "Error"),
    ],
)
async def test_a_tool_that_failed(
    served: Served, plain: Tokenizer, result: dict[str, Any], told: str
) -> None:
    """The model reads that it did, in the only place that templates have for a result."""
    block = {"type": "tool_result", "tool_use_id": "t1", **result}
    async with served(using=plain) as client:
        await message_of(client, messages=[{"role": "user", "content": [block]}])
        [request] = client.backend.requests
        assert bytes(request.prompt).decode() == f"<tool>{told}"
        block["is_error"] = "yes"
        status, _ = await client.post(
            PATH, {**HI, "messages": [{"role": "user", "content": [block]}]}
        )
        assert status == 400


async def test_uses_of_tools(served: Served, plain: Tokenizer) -> None:
    """Calls are blocks of their own, with their input as an object."""
    async with served(f"I look.{CALL}{CALL}", using=plain) as client:
        for message in (
            await message_of(client, tools=TOOLS),
            message_from(await events_of(client, tools=TOOLS)),
        ):
            text, *uses = message["content"]
            assert text == {"type": "text", "text": "I look."}
            for use in uses:
                assert use.pop("id")
                assert use == {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}
            assert len(uses) == 2
            assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
        single = {"type": "auto", "disable_parallel_tool_use": True}
        message = await message_of(client, tools=TOOLS, tool_choice=single)
        assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
        assert message["stop_reason"] == "tool_use"
        message = await message_of(client, tools=TOOLS, tool_choice={"type": "none"})
        assert message["content"][0]["text"] == f"I look.{CALL}{CALL}"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_forced_uses(served: Served, plain: Tokenizer, choice: Any) -> None:
    """any and tool hold the model to a call."""
    async with served('{"name": "weather", "arguments": {}}', using=plain) as client:
        message = await message_of(client, tools=TOOLS, tool_choice=choice)
        [use] = message["content"]
        assert (use["name"], use["input"], message["stop_reason"]) == ("weather", {}, "tool_use")
        assert client.backend.requests[0].grammar is not None


async def test_thoughts(served: Served, tokenizer: Tokenizer) -> None:
    """Thoughts are blocks of their own; the template is told whether they are wanted."""
    source = "{{ messages[-1].content }}{{ enable_thinking }}"
    thinker = attrs.evolve(
        tokenizer,
        template=ChatTemplate(source, Path("here")),
        thinking=Thinking("<think>", "</think>"),
    )
    wanted = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with served("<think>hm</think>yes", using=thinker) as client:
        blocks = [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "yes"},
        ]
        assert (await message_of(client, **wanted))["content"] == blocks
        assert message_from(await events_of(client, **wanted))["content"] == blocks
        await message_of(client)
        await message_of(client, thinking={"type": "adaptive"})
        prompts = [bytes(request.prompt) for request in client.backend.requests]
        assert prompts == [b"hiTrue", b"hiTrue", b"hiFalse", b"hi"]
    async with served() as client:
        status, body = await client.post(PATH, {**HI, **wanted})
        assert status == 400
        assert "'thinking'" in body["error"]["message"]


async def test_an_answer_that_has_begun(served: Served, plain: Tokenizer) -> None:
    """A last message of the assistant's is gone on with."""
    messages = [*HI["messages"], {"role": "assistant", "content": "well,"}]  # type: ignore[misc]
    async with served(" yes", using=plain) as client:
        message = await message_of(client, messages=messages)
        assert message["content"] == [{"type": "text", "text": " yes"}]
        assert bytes(client.backend.requests[0].prompt) == b"<user>hiwell,"


async def test_counting(served: Served) -> None:
    """The count is that of the prompt which the same body would make, without max_tokens."""
    async with served() as client:
        message = await message_of(client, system="be good")
        body = {"messages": HI["messages"], "system": "be good"}
        status, counted = await client.post(f"{PATH}/count_tokens", body)
        assert (status, counted) == (200, {"input_tokens": message["usage"]["input_tokens"]})


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"messages": []},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
        {"system": 5},
        {"system": [{"type": "image"}]},
        {"thinking": {"type": "sometimes"}},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"tools": [{"name": "f"}]},
        {"tool_choice": {"type": "any"}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"stop_sequences": [""]},
        {"temperature": "warm"},
        {"mcp_servers": [{}]},
        {"container": "x"},
        {"n": 2},
        {"logprobs": True},
        {"stop": "x"},
        {"response_format": {"type": "json_object"}},
        {"model": 5},
    ],
)
async def test_what_is_refused(served: Served, fields: dict[str, Any]) -> None:
    """Errors have Anthropic's form, and name the field."""
    async with served(context=4096) as client:
        status, body = await client.post(PATH, {**HI, **fields})
        assert status == 400
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert f"'{next(iter(fields))}" in body["error"]["message"] or "tool" in str(fields)
        assert client.backend.requests == []


async def test_errors_by_status(served: Served) -> None:
    """Each kind of error has the type that Anthropic's clients know."""
    async with served(api_keys=("key",)) as client:
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "kez"}, 401),
            ({"x-api-key": "key"}, 200),
        ):
            found, body = await client.post(PATH, HI, headers=headers)
            assert found == status
            assert status == 200 or body["error"]["type"] == "authentication_error"
        headers = {"x-api-key": "key"}
        status, body = await client.post(PATH, {**HI, "model": "claude"}, headers=headers)
        assert (status, body["error"]["type"]) == (404, "not_found_error")
        client.backend.phase = "loading"
        status, body = await client.post(PATH, HI, headers=headers)
        assert (status, body["error"]["type"]) == (503, "overloaded_error")


async def test_a_failure_mid_stream(served: Served) -> None:
    """A stream that breaks ends with an error event."""
    async with served("hello") as client:
        client.gate.close()
        client.gate.let(4)
        async with client.session.post(PATH, json={**HI, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            client.gate.fail = ValueError("no such thing")
            client.gate.release()
            events = (await response.read()).decode().strip().split("\n\n")
        name, data = events[-1].split("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"
