"""Thoughts come apart from the answer."""

from __future__ import annotations

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
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
ANSWER = "<think>\nLet me see.\n</think>\n\nIt is 4."
THOUGHT = "Let me see.\n"


@pytest.fixture
def thinker(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer whose model marks its thoughts itself."""
    return attrs.evolve(tokenizer, thinking=Thinking("<think>", "</think>"))


@pytest.fixture
def opener(thinker: Tokenizer) -> Tokenizer:
    """One whose template opens the thoughts, unless it is told not to."""
    source = (
        "{{ messages[-1].content }}>{% if enable_thinking is defined and not enable_thinking %}"
        "<think></think>{% else %}<think>\n{% endif %}"
    )
    return attrs.evolve(thinker, template=ChatTemplate(source, Path("here")))


async def message_of(client: Any, **fields: Any) -> tuple[dict[str, Any], str]:
    status, body = await client.post(CHAT, {"messages": MESSAGES, **fields})
    assert status == 200, body
    [choice] = body["choices"]
    return choice["message"], choice["finish_reason"]


async def deltas_of(client: Any, **fields: Any) -> tuple[str, str, str]:
    """All thoughts, all content and the finish reason of a stream."""
    chunks = await client.chunks(CHAT, {"messages": MESSAGES, **fields})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [
        "".join(choice["delta"].get(name) or "" for choice in choices)
        for name in ("reasoning_content", "content")
    ]
    [reason] = [c["finish_reason"] for c in choices if c["finish_reason"]]
    return texts[0], texts[1], reason


async def test_thoughts_and_answer(served: Served, thinker: Tokenizer) -> None:
    """What stands between the marks is reasoning_content, whole and streamed."""
    async with served(ANSWER, using=thinker) as client:
        message, reason = await message_of(client)
        assert message == {
            "role": "assistant",
            "content": "It is 4.",
            "reasoning_content": THOUGHT,
        }
        assert reason == "stop"
        assert await deltas_of(client) == (THOUGHT, "It is 4.", "stop")


@pytest.mark.parametrize("limit", [3, 9, 20, 30, 36])
async def test_cut_inside_thoughts(served: Served, opener: Tokenizer, limit: int) -> None:
    """Content is there, empty, when the limit ends the text inside the thoughts."""
    answer = ANSWER.removeprefix("<think>\n")
    async with served(answer, using=opener) as client:
        message, reason = await message_of(client, max_tokens=limit)
        thought, end, said = answer[:limit].partition("</think>")
        if not end:
            assert message["content"] == ""
            assert message["reasoning_content"] == thought
        else:
            assert message["content"] == said.lstrip()
        assert reason == ("length" if limit < len(answer) + 1 else "stop")
        streamed = await deltas_of(client, max_tokens=limit)
        assert streamed[:2] == (message.get("reasoning_content", ""), message["content"])


async def test_the_template_may_be_told_not_to(served: Served, opener: Tokenizer) -> None:
    """enable_thinking reaches the template; no effort at all means the same."""
    async with served("It is 4.", using=opener) as client:
        for quiet in (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "none"},
            {"enable_thinking": False},
            {"thinking": {"type": "disabled"}},
        ):
            message, _ = await message_of(client, **quiet)
            assert message == {"role": "assistant", "content": "It is 4."}
        prompts = [bytes(request.prompt) for request in client.backend.requests]
        assert prompts == [b"hi><think></think>"] * 4


async def test_a_variable_that_no_template_reads(served: Served, thinker: Tokenizer) -> None:
    """What would be ignored is refused; a model without thoughts can do without them."""
    async with served() as client:
        assert (await client.chat(chat_template_kwargs={"enable_thinking": False}))[0] == 200
        assert (await client.chat(reasoning_effort="none"))[0] == 200
        assert (await client.chat(enable_thinking=False))[0] == 200
        for fields in (
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
            {"thinking": {"type": "enabled"}},
        ):
            status, body = await client.chat(**fields)
            assert (status, body["error"]["param"]) == (400, "enable_thinking")
        status, body = await client.chat(reasoning_effort="high")
        assert (status, body["error"]["code"]) == (400, "unsupported_parameter")
    async with served(using=thinker) as client:
        assert (await client.chat(reasoning_effort="none"))[0] == 400


async def test_a_grammar_leaves_thoughts_out(served: Served, opener: Tokenizer) -> None:
    """Where the form of the text is given, the prompt ends the thoughts that it began."""
    async with served('{"a":1}', using=opener) as client:
        message, _ = await message_of(client, response_format={"type": "json_object"})
        assert message == {"role": "assistant", "content": '{"a":1}'}
        [request] = client.backend.requests
        assert bytes(request.prompt) == b"hi><think>\n</think>\n\n"
        assert request.grammar is not None


async def test_earlier_thoughts_reach_the_template(served: Served, tokenizer: Tokenizer) -> None:
    """reasoning_content of the history is the template's to use."""
    source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
    using = attrs.evolve(tokenizer, template=ChatTemplate(source, Path("here")))
    async with served(using=using) as client:
        history = [{"role": "assistant", "content": "a", "reasoning_content": "b"}, *MESSAGES]
        await client.post(CHAT, {"messages": history})
        assert bytes(client.backend.requests[0].prompt) == b"b|a;|hi;"


async def test_a_developer_is_the_system(served: Served, tokenizer: Tokenizer) -> None:
    """Templates that do not know developers are told of the system instead."""
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    messages = [{"role": "developer", "content": "be good"}, *MESSAGES]
    for more, role in (("", "system"), ("{# developer #}", "developer")):
        using = attrs.evolve(tokenizer, template=ChatTemplate(source + more, Path("here")))
        async with served(using=using) as client:
            await client.post(CHAT, {"messages": messages})
            prompt = bytes(client.backend.requests[0].prompt).decode()
            assert prompt == f"{role}:be good;user:hi;"
