"""The official clients where the model must say something: calls of tools, thoughts, errors.

The rest of what they do is shown against a real server, in tests/e2e.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import attrs
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from mlxcel.engine.chat_template import ChatTemplate
from mlxcel.engine.engine import Settings
from mlxcel.engine.limits import Limits
from mlxcel.engine.thinking import Thinking
from mlxcel.engine.tokenizer import Tokenizer

Served = Callable[..., AbstractAsyncContextManager[Any]]
QUESTION: list[Any] = [{"role": "user", "content": "How is the weather?"}]
CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = f"I look.{CALL}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


class Weather(BaseModel):
    """Says how the weather is."""

    city: str


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


@pytest.fixture
def thinker(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer whose model marks its thoughts."""
    return attrs.evolve(tokenizer, thinking=Thinking("<think>", "</think>"))


@asynccontextmanager
async def clients(
    served: Served, *arguments: Any, **options: Any
) -> AsyncIterator[tuple[AsyncOpenAI, AsyncAnthropic, Any]]:
    """Both clients of a server, and the server."""
    async with served(*arguments, **options) as server:
        url = f"http://127.0.0.1:{server.port}"
        kept = {"api_key": "none", "timeout": 60.0, "max_retries": 0}
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", **kept) as ours,
            AsyncAnthropic(base_url=url, **kept) as theirs,
        ):
            yield ours, theirs, server


async def test_openai_calls_of_tools(served: Served, caller: Tokenizer) -> None:
    """A pydantic tool goes in, its parsed arguments come out; the tool's result is taken."""
    tool = openai.pydantic_function_tool(Weather)
    async with clients(served, ANSWER, using=caller) as (client, _, server):
        wanted = {"model": "tiny", "messages": QUESTION, "tools": [tool]}
        answer = await client.chat.completions.parse(**wanted)
        [choice] = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        [call] = choice.message.tool_calls or []
        assert call.function.parsed_arguments == Weather(city="Oslo")
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
        more = [*QUESTION, choice.message.to_dict(), result]
        await client.chat.completions.create(model="tiny", messages=more, tools=[tool])
        prompt = bytes(server.backend.requests[-1].prompt).decode()
        assert prompt.endswith("<assistant>I look.<tool_call>Oslo<tool>Rain.")


async def test_openai_streams_of_calls(served: Served, caller: Tokenizer) -> None:
    """The client's own helper puts content and call together from the chunks."""
    tool = openai.pydantic_function_tool(Weather)
    async with clients(served, ANSWER, using=caller) as (client, _, _):
        wanted = {"model": "tiny", "messages": QUESTION, "tools": [tool]}
        async with client.chat.completions.stream(**wanted) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        [choice] = final.choices
        [call] = choice.message.tool_calls or []
        assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
        assert (call.function.name, call.function.parsed_arguments) == (
            "Weather",
            Weather(city="Oslo"),
        )
        assert "tool_calls.function.arguments.done" in kinds


async def test_anthropic_calls_of_tools(served: Served, caller: Tokenizer) -> None:
    """Text and a call are two blocks; the tool's result is taken."""
    tools: Any = [{"name": "Weather", "input_schema": SCHEMA}]
    async with clients(served, ANSWER, using=caller) as (_, client, server):
        message = await client.messages.create(
            model="tiny", messages=QUESTION, max_tokens=100, tools=tools
        )
        text, call = message.content
        assert text.type == "text" and text.text == "I look."
        assert call.type == "tool_use" and (call.name, call.input) == ("Weather", {"city": "Oslo"})
        assert message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
        more: Any = [
            *QUESTION,
            {"role": "assistant", "content": [block.to_dict() for block in message.content]},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(model="tiny", messages=more, max_tokens=100, tools=tools)
        prompt = bytes(server.backend.requests[-1].prompt).decode()
        assert prompt.endswith("<assistant>I look.<tool_call>Oslo<tool>Rain.")


async def test_anthropic_streams_of_calls(served: Served, caller: Tokenizer) -> None:
    """The client puts the same blocks together from a stream."""
    tools: Any = [{"name": "Weather", "input_schema": SCHEMA}]
    async with clients(served, ANSWER, using=caller) as (_, client, _):
        async with client.messages.stream(
            model="tiny", messages=QUESTION, max_tokens=100, tools=tools
        ) as stream:
            parts = [e.delta.partial_json async for e in stream if _is_input(e)]
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["text", "tool_use"]
        assert json.loads("".join(parts)) == {"city": "Oslo"}
        assert final.stop_reason == "tool_use"


def _is_input(event: Any) -> bool:
    return event.type == "content_block_delta" and event.delta.type == "input_json_delta"


async def test_thoughts(served: Served, thinker: Tokenizer) -> None:
    """OpenAI's client has them as an extra field, Anthropic's as a block."""
    answer = "<think>Let me see.</think>It is 4."
    async with clients(served, answer, using=thinker) as (ours, theirs, _):
        chat = await ours.chat.completions.create(model="tiny", messages=QUESTION)
        message: Any = chat.choices[0].message
        assert (message.reasoning_content, message.content) == ("Let me see.", "It is 4.")
        thought = await theirs.messages.create(
            model="tiny",
            messages=QUESTION,
            max_tokens=100,
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        found = [(block.type, getattr(block, block.type)) for block in thought.content]
        assert found == [("thinking", "Let me see."), ("text", "It is 4.")]


async def test_a_full_queue(served: Served, eventually: Any) -> None:
    """Is each client's error for it, and a client that retries is answered in the end."""
    settings = Settings(Limits(parallel=1), queue_depth=1)
    async with clients(served, settings=settings) as (ours, theirs, server):
        server.gate.close()
        running = asyncio.create_task(server.complete())
        await eventually(lambda: server.backend.active == 1)
        waiting = asyncio.create_task(server.complete())
        await eventually(lambda: server.backend.waiting == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await ours.completions.create(model="tiny", prompt="hi")
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["Retry-After"] == "1"
        with pytest.raises(anthropic.RateLimitError):
            await theirs.messages.create(model="tiny", messages=QUESTION, max_tokens=9)
        patient = ours.with_options(max_retries=5)
        retried = asyncio.create_task(patient.completions.create(model="tiny", prompt="hi"))
        await eventually(lambda: len(server.backend.requests) > 4)
        server.gate.release()
        assert (await retried).choices[0].text == "hello"
        assert [(await task)[0] for task in (running, waiting)] == [200, 200]


async def test_a_stream_that_breaks(served: Served) -> None:
    """A stage that fails amid a stream is the client's error, with what came before it."""
    async with clients(served, "hello") as (client, _, server):
        server.gate.close()
        server.gate.let(3)
        stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
        first = (await anext(stream)).choices[0].text
        server.gate.fail = RuntimeError("lost")
        server.gate.release()
        with pytest.raises(openai.APIError) as caught:
            first += "".join([chunk.choices[0].text async for chunk in stream])
        assert caught.value.code == "stage_failed"
        assert "hello".startswith(first) and first
