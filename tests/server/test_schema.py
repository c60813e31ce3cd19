"""What requests may say, and what is refused by name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.pipeline.operations import Sampling
from mlxcel.server.errors import ApiError
from mlxcel.server.fields import parse_object
from mlxcel.server.schema import DEFAULT_MAX_TOKENS, UNSUPPORTED, read_chat, read_completion

USER = {"role": "user", "content": "hi"}


def refusal(body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_chat({"messages": [USER], **body})
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_greedy_and_512_tokens() -> None:
    """A request that says nothing more gets 512 tokens at temperature 0, whole."""
    made = read_completion({"prompt": "hi"}).generation
    assert made.max_tokens == DEFAULT_MAX_TOKENS == 512
    assert made.sampling == Sampling(seed=made.sampling.seed)
    assert (made.model, made.stop, made.stream, made.include_usage) == (None, (), False, False)


def test_null_is_as_good_as_absent() -> None:
    """Clients that send null for what they leave open get the default."""
    names = ["model", "max_tokens", "temperature", "top_p", "stop", "seed", "stream", "tools", "n"]
    nulls = dict.fromkeys([*names, "stream_options", "logit_bias", "logprobs"])
    assert read_completion({"prompt": "hi", **nulls}).generation.max_tokens == 512


def test_every_field_is_read() -> None:
    """All fields that steer sampling arrive in it."""
    body = {
        "model": "tiny",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": 0.25,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 100, "6": -1.5},
        "stop": ["a", "b"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "somebody",
        "never_heard_of": [1],
    }
    made = read_chat({"messages": [USER], **body}).generation
    assert made.sampling == Sampling(
        0.5,
        0.9,
        5,
        0.1,
        -3,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-1,
        bias_tokens=(5, 6),
        bias_values=(100, -1.5),
    )
    assert (made.model, made.max_tokens, made.stop) == ("tiny", 7, ("a", "b"))
    assert made.stream and made.include_usage


def test_the_newer_limit_goes_first() -> None:
    """max_completion_tokens says the same as max_tokens, and is preferred."""
    made = read_chat({"messages": [USER], "max_tokens": 7, "max_completion_tokens": 9})
    assert made.generation.max_tokens == 9


def test_seeds_are_drawn() -> None:
    """Two requests without a seed do not draw the same tokens."""
    seeds = {read_completion({"prompt": "x"}).generation.sampling.seed for _ in range(8)}
    assert len(seeds) == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_completion_tokens", 1 << 40),
        ("temperature", -1),
        ("temperature", "warm"),
        ("temperature", 2.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2),
        ("seed", 1 << 63),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", []),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": "2"}),
        ("logit_bias", {str(i): 0 for i in range(2000)}),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ""),
        ("stop", ["a"] * 5),
        ("stop", {"a": 1}),
        ("stream", "yes"),
        ("stream", 1),
        ("stream_options", True),
        ("stream_options", {"include_usage": True}),
        ("model", 5),
    ],
)
def test_a_value_that_does_not_fit_is_named(field: str, value: object) -> None:
    """The error names the field at fault."""
    error = refusal({field: value})
    assert field in error.message
    assert str(error.param).startswith(field)


ASKS = {
    "audio": {"voice": "x"},
    "best_of": 2,
    "chat_template_kwargs": {"enable_thinking": False},
    "echo": True,
    "function_call": {"name": "f"},
    "functions": [{}],
    "logprobs": True,
    "modalities": ["text", "audio"],
    "n": 2,
    "prediction": {"type": "content"},
    "response_format": {"type": "json_object"},
    "suffix": "end",
    "tool_choice": "required",
    "tools": [{"type": "function"}],
    "top_logprobs": 3,
}


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_what_would_be_ignored_is_refused(field: str) -> None:
    """A field that would change the answer is refused by name, not ignored."""
    error = refusal({field: ASKS[field]})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    for harmless in UNSUPPORTED[field]:
        read_chat({"messages": [USER], field: harmless})


def test_zero_is_not_false() -> None:
    """The older API's logprobs 0 asks for log-probabilities."""
    assert refusal({"logprobs": 0}).param == "logprobs"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ({"role": "user"}, "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([USER, {"content": "x"}], "messages[1].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "assistant", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_messages_are_checked(messages: object, param: str) -> None:
    """A message that is none is refused where it stands."""
    error = refusal({"messages": messages})
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": ""},
    ],
)
def test_messages_of_every_form_are_read(message: dict[str, Any]) -> None:
    """Text parts, and an assistant without content, are as good as text."""
    assert read_chat({"messages": [USER, message]}).messages == (USER, message)


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, ["a", "b"], [1, 2], [[1, 2]]])
def test_a_prompt_is_one_string(prompt: object) -> None:
    """Lists of prompts and of token ids are refused by name."""
    with pytest.raises(ApiError, match="'prompt'") as caught:
        read_completion({"prompt": prompt})
    assert caught.value.status == 400


NO_OBJECTS = [
    *(b"", b"{", b'{"prompt": "a', b"[]", b'"a"', b"1", b"null", b"\xff\xfe\xff", b"[" * 100_000),
    *(b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"seed": ' + b"9" * 5000 + b"}"),
]


@pytest.mark.parametrize("data", NO_OBJECTS)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    """A truncated, empty or otherwise unreadable body is the client's fault."""
    with pytest.raises(ApiError) as caught:
        parse_object(data)
    assert caught.value.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
NAMES = ["messages", "prompt", "stop", "seed", "logit_bias", "stream_options", *UNSUPPORTED]


@given(st.dictionaries(st.sampled_from(NAMES), JSON))
def test_no_body_breaks_the_reader(body: dict[str, Any]) -> None:
    """Whatever JSON comes, it is read or refused."""
    for read in (read_chat, read_completion):
        with contextlib.suppress(ApiError):
            read(body)
