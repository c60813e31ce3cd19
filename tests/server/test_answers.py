"""The objects that clients of OpenAI's APIs get."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mlxcel.engine.sequence import Output
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.pipeline.step import Logprobs
from mlxcel.server.answers import usage
from mlxcel.server.chat_answer import ChatAnswer
from mlxcel.server.choice import Choice, Prompt
from mlxcel.server.parts import Content, Reasoning, ToolCall
from mlxcel.server.readers import PlainReader
from mlxcel.server.text_answer import TextAnswer

MODEL = 'a "model" named ""'
Make = Callable[..., Any]


def events(data: bytes) -> list[dict[str, Any]]:
    """The chunks in ``data``, without what every chunk has."""
    *blocks, rest = data.decode("ascii").split("\n\n")
    assert rest == ""
    chunks = []
    for block in blocks:
        assert block.startswith("data: ") and "\n" not in block
        chunks.append(json.loads(block[6:]))
        assert chunks[-1].pop("created") > 1e9
        assert chunks[-1].pop("model") == MODEL
    return chunks


def choice(index: int = 0, prompt: int = 3, **more: Any) -> Choice:
    first = more.pop("first", True)
    made = Choice(index, Prompt(tuple(range(prompt))), first, PlainReader())
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("text", ["a", '"quoted"\n', "日本 😀", "\\", '""'])
@pytest.mark.parametrize("index", [0, 7])
@pytest.mark.parametrize("make", [ChatAnswer, TextAnswer])
def test_a_piece_says_exactly_its_text(
    make: Make, tokenizer: Tokenizer, index: int, text: str
) -> None:
    """Whatever the text, the chunk is JSON with that text in it, for the right choice."""
    answer = make(MODEL, tokenizer)
    for _ in range(2):  # the first makes the template, the second uses it
        [chunk] = events(answer.piece(choice(index), [Content(text)], Output(1, text)))
        [found] = chunk["choices"]
        assert (found["index"], found["finish_reason"]) == (index, None)
        assert (found["delta"]["content"] if make is ChatAnswer else found["text"]) == text


def test_chat_chunks(tokenizer: Tokenizer) -> None:
    """A chat begins with the role and ends with an empty delta, the usage, and [DONE]."""
    answer, one = ChatAnswer(MODEL, tokenizer), choice(finish_reason="stop", tokens=[1, 2, 3, 4])
    [opening] = events(answer.opening([one]))
    kind = {"id": opening["id"], "object": "chat.completion.chunk"}
    delta = {"role": "assistant", "content": ""}
    assert opening == {**kind, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert events(answer.last(one)) == [{**kind, "choices": [last]}]
    used, _, done = answer.closing([one], True).partition(b"data: [DONE]")
    assert done == b"\n\n"
    assert events(used) == [{**kind, "choices": [], "usage": usage([one])}]
    assert answer.closing([one], False) == b"data: [DONE]\n\n"
    assert kind["id"].startswith("chatcmpl-")


def test_text_chunks(tokenizer: Tokenizer) -> None:
    """A completion has no opening but an echo; its last chunk has no text."""
    answer, one = TextAnswer(MODEL, tokenizer), choice(finish_reason="length")
    assert answer.opening([one]) == b""
    echoing = choice(prompt=0)
    echoing.prompt = Prompt((1, 2), "ab")
    [chunk] = events(answer.opening([one, echoing]))
    assert chunk["choices"] == [{"index": 0, "text": "ab", "finish_reason": None}]
    [last] = events(answer.last(one))
    assert last["object"] == "text_completion"
    assert last["choices"] == [{"index": 0, "text": "", "finish_reason": "length"}]


def test_usage_counts_each_prompt_once() -> None:
    """Choices of one prompt share its tokens; their own add up."""
    choices = [
        choice(0, 3, tokens=[1, 2], cached=2),
        choice(1, 3, first=False, tokens=[1], cached=3),
        choice(2, 5, tokens=[1, 2, 3]),
    ]
    assert usage(choices) == {
        "prompt_tokens": 8,
        "completion_tokens": 6,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_a_message_of_all_parts(tokenizer: Tokenizer) -> None:
    """Thoughts, content and calls have fields of their own; content is null only beside calls."""
    parts = [Reasoning("hm"), Content("I "), Content("look."), ToolCall("c1", "f", '{"a": 1}')]
    answer = ChatAnswer(MODEL, tokenizer)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    whole = answer.whole([choice(finish_reason="stop", calls=1, parts=parts)])
    message = {"role": "assistant", "content": "I look.", "reasoning_content": "hm"}
    assert whole["choices"] == [
        {"index": 0, "message": {**message, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    ]
    [only_call] = answer.whole([choice(finish_reason="stop", calls=1, parts=parts[3:])])["choices"]
    assert only_call["message"]["content"] is None
    [only_thought] = answer.whole([choice(finish_reason="length", parts=parts[:1])])["choices"]
    assert only_thought["message"] == {**message, "content": ""}


def test_calls_are_numbered(tokenizer: Tokenizer) -> None:
    """The calls of one choice have indices from 0, each choice by itself."""
    answer = ChatAnswer(MODEL, tokenizer)
    numbers = []
    for index in (0, 1, 0):
        data = answer.piece(choice(index), [ToolCall("x", "f", "{}")], Output(1))
        [chunk] = events(data)
        [call] = chunk["choices"][0]["delta"]["tool_calls"]
        numbers.append((index, call["index"], call["function"]))
    function = {"name": "f", "arguments": "{}"}
    assert numbers == [(0, 0, function), (1, 0, function), (0, 1, function)]


def test_log_probabilities_of_a_chat(tokenizer: Tokenizer) -> None:
    """Each token has its text, its bytes and the likeliest; half characters have bytes too."""
    answer = ChatAnswer(MODEL, tokenizer, True)
    found = (Logprobs(-0.5, (0xE6, 65), (-0.25, -2.0)), Logprobs(-1.0))
    data = answer.piece(choice(), [], Output(1, "", (0xE6, 65), logprobs=found))
    [chunk] = events(data)
    assert chunk["choices"][0]["delta"] == {"content": ""}
    half = {"token": "\ufffd", "bytes": [0xE6]}
    a = {"token": "A", "bytes": [65]}
    assert chunk["choices"][0]["logprobs"]["content"] == [
        {
            **half,
            "logprob": -0.5,
            "top_logprobs": [{**half, "logprob": -0.25}, {**a, "logprob": -2.0}],
        },
        {**a, "logprob": -1.0, "top_logprobs": []},
    ]


def test_log_probabilities_of_a_text(tokenizer: Tokenizer) -> None:
    """The older form has lists, with places in the text; the drawn token is always among them."""
    tokens = [*"é!".encode(), 66]
    found = tuple(Logprobs(-float(n), (65,), (-9.0,)) for n in range(len(tokens)))
    answer, one = TextAnswer(MODEL, tokenizer, True), choice()
    pieces = [
        events(answer.piece(one, [], Output(1, "", (t,), logprobs=(f,))))[0]["choices"][0]
        for t, f in zip(tokens, found, strict=True)
    ]
    streamed = [piece["logprobs"] for piece in pieces]
    assert [one["tokens"] for one in streamed] == [["\ufffd"], ["\ufffd"], ["!"], ["B"]]
    assert [one["text_offset"] for one in streamed] == [[0], [0], [1], [2]]
    assert streamed[3]["top_logprobs"] == [{"A": -9.0, "B": -3.0}]
    whole = choice(finish_reason="stop", drawn=list(zip(tokens, found, strict=True)))
    [made] = TextAnswer(MODEL, tokenizer, True).whole([whole])["choices"]
    for name, values in made["logprobs"].items():
        assert values == [value for piece in streamed for value in piece[name]]


@pytest.mark.parametrize("make", [ChatAnswer, TextAnswer])
def test_ids_differ(make: Make, tokenizer: Tokenizer) -> None:
    """Every answer has an id of its own."""
    one = choice(finish_reason="stop")
    assert len({events(make(MODEL, tokenizer).last(one))[0]["id"] for _ in range(8)}) == 8
