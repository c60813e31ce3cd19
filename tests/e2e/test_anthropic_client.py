"""The official Anthropic client against a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

KEY = "s3cret"
MODEL = "tiny"
SECONDS = 60.0
GREEDY = {"temperature": 0.0}
QUESTION: list[Any] = [{"role": "user", "content": "Which colour is the sky?"}]


@pytest.fixture(scope="module")
def client(serve: Callable[..., str], tiny: Callable[..., Path]) -> Anthropic:
    flags = ["--alias", MODEL, "--api-key", KEY, "--pp-workers", "thread", "--pp-size", "2"]
    url = serve(tiny("llama"), *flags)
    return Anthropic(base_url=url, api_key=KEY, timeout=SECONDS, max_retries=0)


def ask(client: Anthropic, **fields: Any) -> Any:
    wanted = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "extra_body": GREEDY}
    return client.messages.create(**{**wanted, **fields})


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message(client: Anthropic) -> None:
    """Text, the reason it ended, and what it used."""
    message = ask(client)
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens <= 12
    assert text_of(ask(client)) == text_of(message)


def test_messages_of_all_kinds(client: Anthropic) -> None:
    """A system text or blocks of it, content blocks, and an answer begun by the client."""
    blocks: list[Any] = [{"type": "text", "text": "Which colour "}, {"type": "text", "text": "?"}]
    turns = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And the sea?"},
    ]
    assert ask(client, messages=turns, system="Be brief.").usage.input_tokens > 0
    assert ask(client, system=[{"type": "text", "text": "Be brief."}]).role == "assistant"


def test_a_stream(client: Anthropic) -> None:
    """The pieces are the whole message, and the client puts the same one together."""
    whole = ask(client)
    with client.messages.stream(
        model=MODEL, messages=QUESTION, max_tokens=12, extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_the_events_of_a_stream(client: Anthropic) -> None:
    """They come in the order that the protocol has."""
    kinds = [event.type for event in ask(client, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    assert kinds.count("content_block_delta") >= 1


def test_stop_sequences(client: Anthropic) -> None:
    """The text ends before one, which is named."""
    text = text_of(ask(client))
    stop = next(character for character in text[2:] if not character.isspace())
    message = ask(client, stop_sequences=[stop])
    assert text_of(message) == text[: text.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_tool_results(client: Anthropic) -> None:
    """A conversation in which a tool was used is taken."""
    turns = [
        *QUESTION,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"where": "up"}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "blue"}],
        },
    ]
    assert ask(client, messages=turns).role == "assistant"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "claude"}, anthropic.NotFoundError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"extra_body": {"temperature": 9.0}}, anthropic.BadRequestError),
        (
            {"messages": [{"role": "user", "content": "x" * 1000}]},
            anthropic.BadRequestError,
        ),
    ],
)
def test_errors(client: Anthropic, fields: Any, kind: Any) -> None:
    """Refusals are the client's own exceptions, and have Anthropic's shape."""
    with pytest.raises(kind) as caught:
        ask(client, **fields)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["message"]


def test_a_wrong_key(client: Anthropic) -> None:
    """Is the client's authentication error."""
    with pytest.raises(anthropic.AuthenticationError):
        ask(client.with_options(api_key="wrong"))


@pytest.mark.slow
def test_the_real_model(serve: Callable[..., str], demo_model: Path) -> None:
    """It answers, whole and streamed."""
    url = serve(demo_model, "--alias", MODEL, "--pp-size", "2")
    client = Anthropic(base_url=url, api_key="none", timeout=10 * SECONDS, max_retries=0)
    question = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    message = ask(client, messages=question, max_tokens=20)
    assert text_of(message) == "The capital of France is Paris."
    assert message.stop_reason == "end_turn"
    with client.messages.stream(
        model=MODEL, messages=question, max_tokens=20, extra_body=GREEDY
    ) as stream:
        assert "".join(stream.text_stream) == text_of(message)
