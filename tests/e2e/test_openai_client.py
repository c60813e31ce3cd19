"""The official OpenAI client against a real server: what it sends is taken, what it gets it reads.

The tiny model talks nonsense, so texts are compared with each other, not with what is true.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

KEY = "s3cret"
MODEL = "tiny"
SECONDS = 60.0
BYTES = {str(token): -100 for token in range(256, 288)}
"""Bans the tiny model's special tokens: answers have their whole length, and all of it is text."""

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which colour is the sky?"},
]


class Verdict(BaseModel):
    """What the model is made to say; it ends whatever the model likes."""

    colour: Literal["red", "green"]
    sure: bool


@pytest.fixture(scope="module")
def client(serve: Callable[..., str], tiny: Callable[..., Path]) -> OpenAI:
    flags = ["--alias", MODEL, "--api-key", KEY, "--pp-workers", "thread", "--pp-size", "2"]
    url = serve(tiny("llama"), *flags)
    return OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=SECONDS, max_retries=0)


def chat(client: OpenAI, **fields: Any) -> Any:
    wanted = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 12,
        "logit_bias": BYTES,
        "seed": 1,
    }
    return client.chat.completions.create(**{**wanted, "logit_bias": BYTES, **fields})


def complete(client: OpenAI, **fields: Any) -> Any:
    wanted = {"model": MODEL, "prompt": "The sky", "max_tokens": 12, "logit_bias": BYTES, "seed": 1}
    return client.completions.create(**{**wanted, **fields})


def test_models(client: OpenAI) -> None:
    """The list, and the one model by its name."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: OpenAI) -> None:
    """An answer with its reason and usage."""
    answer = chat(client)
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    used = answer.usage
    assert used.completion_tokens == 12
    assert used.total_tokens == used.prompt_tokens + 12
    assert chat(client, max_tokens=None, max_completion_tokens=12).choices == answer.choices


def test_chat_streams(client: OpenAI) -> None:
    """The pieces are the whole; one chunk ends it, one has the usage."""
    whole = chat(client)
    stream = chat(client, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == []
    assert last.usage.completion_tokens == 12


def test_the_clients_own_stream(client: OpenAI) -> None:
    """Its event helper puts the same answer together, and needs nothing that is missing."""
    text = chat(client).choices[0].message.content
    # The helper takes an answer that is cut off for a failure.
    stop = next(character for character in text if character != text[0])
    wanted = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "logit_bias": BYTES}
    with client.chat.completions.stream(**wanted, seed=1, stop=stop) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == text[: text.index(stop)]
    assert final.choices[0].finish_reason == "stop"


def test_completions(client: OpenAI) -> None:
    """A text, whole and in pieces, and with the prompt before it."""
    answer = complete(client)
    assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", "length")
    text = answer.choices[0].text
    assert "".join(c.choices[0].text for c in complete(client, stream=True)) == text
    assert complete(client, echo=True).choices[0].text == "The sky" + text
    assert answer.usage.completion_tokens == 12


def test_prompts_of_all_kinds(client: OpenAI) -> None:
    """Token ids are the same as their text; several prompts have a choice each, in order."""
    ids = list(b"The sky")
    one, other = complete(client).choices[0].text, complete(client, prompt="abc").choices[0].text
    assert complete(client, prompt=ids).choices[0].text == one
    several = complete(client, prompt=["The sky", "abc"]).choices
    assert [(c.index, c.text) for c in several] == [(0, one), (1, other)]
    assert [c.text for c in complete(client, prompt=[ids, list(b"abc")]).choices] == [one, other]


def test_several_choices(client: OpenAI) -> None:
    """They differ, each is repeatable, the usage has all of them; also in a stream."""
    wanted = {"n": 3, "temperature": 1.0}
    answer = chat(client, **wanted)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer.usage.completion_tokens == 36
    assert [c.message.content for c in chat(client, **wanted).choices] == texts
    streamed = ["", "", ""]
    for chunk in chat(client, **wanted, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_seeds_and_sampling(client: OpenAI) -> None:
    """The same seed says the same, another something else; every knob is taken."""
    knobs = {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    texts = [chat(client, **knobs, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    more = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1}
    assert chat(client, extra_body=more).choices[0].message.content


def test_stop(client: OpenAI) -> None:
    """The text ends before a stop string, and the reason says so."""
    text = complete(client).choices[0].text
    stop = text[4]
    answer = complete(client, stop=[stop, "never said"]).choices[0]
    assert answer.text == text[: text.index(stop)]
    assert answer.finish_reason == "stop"


def test_chat_logprobs(client: OpenAI) -> None:
    """Each token has its own and the likeliest; the greedy one is the likeliest."""
    wanted = {"logprobs": True, "top_logprobs": 3, "logit_bias": {"257": -100}}
    choice = chat(client, **wanted).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 12
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert entry.logprob == tops[0] <= 0, "greedy takes the likeliest"
        assert entry.token == entry.top_logprobs[0].token
    assert chat(client).choices[0].logprobs is None
    # Special tokens are drawn like others, and are no part of the text.
    spelt = [bytes(entry.bytes) for entry in entries if not entry.token.startswith("<|")]
    assert b"".join(spelt).decode("utf-8", "replace") == choice.message.content


def test_chat_logprobs_stream(client: OpenAI) -> None:
    """A stream has them all, each with the piece it belongs to."""
    whole = chat(client, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    found = []
    for chunk in chat(client, logprobs=True, top_logprobs=1, stream=True):
        for choice in chunk.choices:
            found += choice.logprobs.content if choice.logprobs else []
    assert [(e.token, e.logprob) for e in found] == [(e.token, e.logprob) for e in whole]


def test_completion_logprobs(client: OpenAI) -> None:
    """The older form: lists side by side, one entry a token."""
    found = complete(client, logprobs=2).choices[0].logprobs
    lengths = {len(found.tokens), len(found.token_logprobs), len(found.text_offset)}
    assert lengths == {12}
    assert all(value <= 0 for value in found.token_logprobs)
    assert all(len(tops) in (1, 2, 3) for tops in found.top_logprobs)


def test_parsed_answers(client: OpenAI) -> None:
    """A pydantic model goes in, an instance of it comes out."""
    parsed = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Verdict, max_tokens=60
    )
    [choice] = parsed.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Verdict)


def test_parsed_streams(client: OpenAI) -> None:
    """The same in a stream."""
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Verdict, max_tokens=60
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Verdict)


def test_json_objects(client: OpenAI) -> None:
    """Anything that is an object, or the beginning of one."""
    answer = chat(client, response_format={"type": "json_object"}, logit_bias=None).choices[0]
    assert answer.message.content.startswith("{")


def test_messages_of_all_kinds(client: OpenAI) -> None:
    """Content parts, tool calls without content, and a tool's answer are taken."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "user", "content": "Well?"},
    ]
    assert chat(client, messages=messages).choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": 9}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"messages": []}, openai.BadRequestError, "invalid_value", "messages"),
        (
            {"messages": [{"role": "user", "content": "x" * 1000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
        ({"modalities": ["audio"]}, openai.BadRequestError, "unsupported_parameter", "modalities"),
    ],
)
def test_errors(client: OpenAI, fields: Any, kind: Any, code: str, param: str) -> None:
    """Refusals are the client's own exceptions, with code and field."""
    with pytest.raises(kind) as caught:
        chat(client, **fields)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_errors_of_streams(client: OpenAI) -> None:
    """What is wrong with a streaming request is told by its status too."""
    with pytest.raises(openai.NotFoundError):
        chat(client, model="gpt-4", stream=True)


def test_a_wrong_key(client: OpenAI) -> None:
    """Is the client's authentication error."""
    with pytest.raises(openai.AuthenticationError) as caught:
        chat(client.with_options(api_key="wrong"))
    assert caught.value.code == "invalid_api_key"


@pytest.fixture(scope="module")
def smollm2(serve: Callable[..., str], demo_model: Path) -> OpenAI:
    url = serve(demo_model, "--alias", MODEL, "--pp-size", "2")
    return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=10 * SECONDS, max_retries=0)


@pytest.mark.slow
def test_the_real_model(smollm2: OpenAI) -> None:
    """It answers, streams, counts log-probabilities and keeps to a schema."""
    messages: list[Any] = [
        {"role": "user", "content": "What is the capital of France? Answer briefly."}
    ]
    wanted = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 20}
    answer = smollm2.chat.completions.create(**wanted, logprobs=True, top_logprobs=2)
    [choice] = answer.choices
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in smollm2.chat.completions.create(**wanted, stream=True)
    ]
    assert "".join(pieces) == choice.message.content
    assert len(pieces) > 5
    parsed = smollm2.chat.completions.parse(**{**wanted, "max_tokens": 60}, response_format=Verdict)
    assert isinstance(parsed.choices[0].message.parsed, Verdict)
    text = smollm2.completions.create(model=MODEL, prompt="1 2 3 4", max_tokens=4, temperature=0)
    assert text.choices[0].text.startswith(" 5")
