"""What requests may say, and what is refused by name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.pipeline.operations import Sampling
from mlxcel.server import chat_schema, completion_schema
from mlxcel.server.chat_schema import read_chat
from mlxcel.server.completion_schema import read_completion
from mlxcel.server.errors import ApiError
from mlxcel.server.fields import DEEPEST, parse_object
from mlxcel.server.messages_schema import MESSAGES_UNSUPPORTED, read_messages_request
from mlxcel.server.schema import DEFAULT_MAX_TOKENS, JSON_OBJECT, MOST_CHOICES
from mlxcel.server.unsupported import UNSUPPORTED, WINDOWS

USER = {"role": "user", "content": "hi"}
CHAT_UNSUPPORTED = {**UNSUPPORTED, **chat_schema.UNSUPPORTED}
TEXT_UNSUPPORTED = {**UNSUPPORTED, **completion_schema.UNSUPPORTED}


def refusal(body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_chat({"messages": [USER], **body})
    assert caught.value.status == 400
    return caught.value


def messages_refusal(body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_messages_request({"messages": [USER], "max_tokens": 5, **body})
    assert caught.value.status == 400
    return caught.value


def text_refusal(body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_completion({"prompt": "hi", **body})
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


def test_values_of_other_servers_that_mean_off() -> None:
    """A top_k of -1 is no limit, and a seed of -1 is drawn anew for every request."""
    body = {"prompt": "x", "top_k": -1, "seed": -1}
    made = [read_completion(body).generation for _ in range(8)]
    assert {each.sampling.top_k for each in made} == {0}
    assert len({each.sampling.seed for each in made}) == 8
    assert not any(each.seeded for each in made)
    said = {"messages": [USER], "max_tokens": 5, "top_k": -1, "seed": -1}
    message = read_messages_request(said).chat.generation
    assert (message.sampling.top_k, message.seeded) == (0, False)


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
        ("top_k", -2),
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
        ("stop", ["a"] * 17),
        ("stop", {"a": 1}),
        ("stream", "yes"),
        ("stream", 1),
        ("stream_options", True),
        ("stream_options", {"include_usage": True}),
        ("model", 5),
        ("n", 0),
        ("n", MOST_CHOICES + 1),
        ("n", "2"),
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("tools", {}),
        ("tools", ["f"]),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {"name": ""}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}]),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", "sometimes"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("parallel_tool_calls", "no"),
        ("response_format", "json"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": "x"}}),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", {"x": {"a": 1}}),
        ("chat_template_kwargs", {"messages": "x"}),
        ("chat_template_kwargs", {"tools": "x"}),
        ("chat_template_kwargs", {"__x": "x"}),
        ("chat_template_kwargs", {"a b": "x"}),
        ("reasoning_effort", 5),
        ("enable_thinking", "no"),
        ("ignore_eos", "yes"),
    ],
)
def test_a_value_that_does_not_fit_is_named(field: str, value: object) -> None:
    """The error names the field at fault."""
    error = refusal({field: value})
    assert field in error.message
    assert str(error.param).startswith(field)


ASKS: dict[str, Any] = {
    "add_generation_prompt": False,
    "include_reasoning": False,
    "continue_final_message": True,
    "echo": True,
    "function_call": {"name": "f"},
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "tools": [{"type": "function"}],
    "use_beam_search": True,
}


@pytest.mark.parametrize("field", sorted(CHAT_UNSUPPORTED))
def test_what_would_be_ignored_is_refused(field: str) -> None:
    """A field that would change the answer is refused by name, not ignored."""
    error = refusal({field: ASKS.get(field, 17)})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert error.message.endswith(CHAT_UNSUPPORTED[field].instead)
    for harmless in CHAT_UNSUPPORTED[field].harmless:
        read_chat({"messages": [USER], field: harmless})


@pytest.mark.parametrize("field", sorted(TEXT_UNSUPPORTED))
def test_what_a_completion_would_ignore_is_refused(field: str) -> None:
    """The older API refuses its own."""
    error = text_refusal({field: ASKS.get(field, 17)})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    for harmless in TEXT_UNSUPPORTED[field].harmless:
        read_completion({"prompt": "hi", field: harmless})


@pytest.mark.parametrize("field", sorted(MESSAGES_UNSUPPORTED))
def test_what_a_message_would_ignore_is_refused(field: str) -> None:
    """Anthropic's API refuses its own."""
    error = messages_refusal({field: ASKS.get(field, 17)})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    for harmless in MESSAGES_UNSUPPORTED[field].harmless:
        read_messages_request({"messages": [USER], "max_tokens": 5, field: harmless})


@pytest.mark.parametrize(
    "field",
    """
    adapters add_special_tokens bad_words dynatemp_range enable_thinking lora max_new_tokens
    min_keep n_probs negative_prompt num_beams prompt_embeds role_mapping samplers tfs_z
    thinking_token_budget top_n_sigma typ_p
    """.split(),
)
def test_fields_of_other_servers_are_known(field: str) -> None:
    """What vLLM, llama.cpp and mlx-lm would do something about is not passed over in silence."""
    assert field in TEXT_UNSUPPORTED
    assert field in CHAT_UNSUPPORTED or field == "enable_thinking"


@pytest.mark.parametrize("field", sorted(WINDOWS))
def test_how_far_penalties_look_back(field: str) -> None:
    """Nobody minds it where there is no penalty; with one, only all of the text is possible."""
    read_chat({"messages": [USER], field: 64, "repetition_penalty": 1.0})
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert refusal({field: 64, penalty: 1.5}).param == field
        read_chat({"messages": [USER], field: -1, penalty: 1.5})


def test_what_does_not_go_together() -> None:
    """Fields that exclude each other are refused, and the one to leave out is named."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    form = {"type": "json_object"}
    both = {"tools": tools, "response_format": form}
    assert refusal(both).param == "response_format"
    read_chat({"messages": [USER], **both, "tool_choice": "none"})
    assert refusal({"top_logprobs": 3}).param == "top_logprobs"
    assert refusal({"n": 2, "best_of": 3}).param == "best_of"
    read_chat({"messages": [USER], "n": 3, "best_of": 3})
    assert text_refusal({"echo": True, "logprobs": 0}).param == "echo"
    assert text_refusal({"prompt": ["a"] * 65, "n": 2}).param == "prompt"


def test_choices_and_log_probabilities() -> None:
    """n and the two ways to ask for log-probabilities reach the engine's own settings."""
    asked = {"n": 3, "logprobs": True, "top_logprobs": 5}
    made = read_chat({"messages": [USER], **asked})
    assert (made.generation.choices, made.generation.sampling.logprobs) == (3, 5)
    assert made.logprobs
    alone = read_chat({"messages": [USER], "logprobs": True})
    assert (alone.logprobs, alone.generation.sampling.logprobs) == (True, 0)
    without = read_chat({"messages": [USER], "logprobs": False, "top_logprobs": 0})
    assert (without.logprobs, without.generation.sampling.logprobs) == (False, None)
    text = read_completion({"prompt": "hi", "logprobs": 0})
    assert (text.logprobs, text.generation.sampling.logprobs) == (True, 0)
    assert not read_completion({"prompt": "hi", "logprobs": False}).logprobs


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("form", "found"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, JSON_OBJECT),
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, JSON_OBJECT),
    ],
)
def test_response_formats(form: dict[str, Any], found: object) -> None:
    """Every form of response_format is the schema that the text must match."""
    assert read_chat({"messages": [USER], "response_format": form}).generation.schema == found
    assert read_completion({"prompt": "a", "response_format": form}).generation.schema == found


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


@pytest.mark.parametrize(
    ("choice", "told", "forced"),
    [
        (None, ["f", "g"], []),
        ("auto", ["f", "g"], []),
        ("none", [], []),
        ("required", ["f", "g"], ["f", "g"]),
        ({"type": "function", "function": {"name": "g"}}, ["f", "g"], ["g"]),
    ],
)
def test_tool_choices(choice: object, told: list[str], forced: list[str]) -> None:
    """tool_choice says what the model is told of, and what it must call."""
    made = read_chat({"messages": [USER], "tools": TOOLS, "tool_choice": choice})
    assert [tool["function"]["name"] for tool in made.tools] == told
    assert [tool["function"]["name"] for tool in made.forced] == forced
    assert made.most_calls is None
    single = {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": False}
    assert read_chat(single).most_calls == 1


def test_a_tool_that_there_is_not() -> None:
    """A call can only be forced of a tool that is there."""
    choice = {"type": "function", "function": {"name": "h"}}
    assert refusal({"tools": TOOLS, "tool_choice": choice}).param == "tool_choice"
    kinds = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS}}
    error = refusal({"tools": TOOLS, "tool_choice": kinds})
    assert (error.param, error.code) == ("tool_choice", "unsupported_parameter")


def test_variables_of_the_template() -> None:
    """chat_template_kwargs and reasoning_effort are what the template is told."""
    given = {"enable_thinking": False, "budget": 5, "name": "x"}
    made = read_chat({"messages": [USER], "chat_template_kwargs": given, "reasoning_effort": "low"})
    assert made.variables == {"reasoning_effort": "low", **given}
    for wanted in (True, False):
        short = read_chat({"messages": [USER], "enable_thinking": wanted})
        assert short.variables == {"enable_thinking": wanted}


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
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
        ([{"role": "assistant", "content": "x", "prefix": True}], "messages[0].prefix"),
    ],
)
def test_messages_are_checked(messages: object, param: str) -> None:
    """A message that is none is refused where it stands."""
    error = refusal({"messages": messages})
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}, "ab"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"role": "assistant", "content": None, "tool_calls": []}, None),
        ({"role": "assistant"}, None),
        ({"role": "user", "content": ""}, ""),
        ({"role": "tool", "tool_call_id": "1", "content": "x"}, "x"),
        ({"role": "developer", "content": "x", "name": "somebody"}, "x"),
    ],
)
def test_messages_of_every_form_are_read(message: dict[str, Any], content: str | None) -> None:
    """Text parts, and an assistant without content, are as good as text."""
    _, read = read_chat({"messages": [USER, message]}).messages
    assert read == {**message, "content": content}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ('{"a": ', '{"a": '),
        ('{"a":' * 200 + "1" + "}" * 200,) * 2,
    ],
)
def test_arguments_of_earlier_calls(given: object, read: object) -> None:
    """Arguments become objects, as templates want them; what is none stays as it was written."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
    [message] = read_chat({"messages": [{"role": "assistant", "tool_calls": [call]}]}).messages
    function = {"name": "f", "arguments": read}
    assert message["tool_calls"] == [{"id": "1", "type": "function", "function": function}]


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompts_of_every_form(prompt: object, read: object) -> None:
    """Strings and token ids, alone and in lists."""
    assert read_completion({"prompt": prompt}).prompts == read


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, [], ["a", 1], [1, -2], [[1], "a"], [True]])
def test_prompts_that_are_none(prompt: object) -> None:
    """What is neither text nor token ids is refused by name."""
    with pytest.raises(ApiError, match="'prompt'") as caught:
        read_completion({"prompt": prompt})
    assert caught.value.status == 400


NO_OBJECTS = [
    *(b"", b"{", b'{"prompt": "a', b"[]", b'"a"', b"1", b"null", b"\xff\xfe\xff", b"[" * 100_000),
    b'{"metadata": ' + b'{"a":' * DEEPEST + b"1" + b"}" * (DEEPEST + 1),
    *(b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"seed": ' + b"9" * 5000 + b"}"),
]


def test_depth_has_a_limit() -> None:
    """A body may have so many levels and no more, however its fields are read later."""
    deepest = b'{"a":' * DEEPEST + b"1" + b"}" * DEEPEST
    assert parse_object(deepest)["a"]
    with pytest.raises(ApiError, match=f"more than {DEEPEST} levels"):
        parse_object(b'{"a":' + deepest + b"}")


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
NAMES = [
    *("messages", "prompt", "stop", "seed", "logit_bias", "stream_options", "tools", "tool_choice"),
    *("response_format", "n", "logprobs", "chat_template_kwargs", "system", "thinking", "echo"),
    *CHAT_UNSUPPORTED,
]


@given(st.dictionaries(st.sampled_from(NAMES), JSON))
def test_no_body_breaks_the_reader(body: dict[str, Any]) -> None:
    """Whatever JSON comes, it is read or refused."""
    for read in (read_chat, read_completion, read_messages_request):
        with contextlib.suppress(ApiError):
            read(body)
