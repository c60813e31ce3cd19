"""Chat templates: what they see, what they may refuse, what they may not do."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from mlxcel.engine import chat_template
from mlxcel.engine.chat_template import ChatTemplate
from mlxcel.errors import ChatTemplateError, ChatTemplateRefusal, UnsupportedError

PATH = Path("model/chat_template.jinja")
HELLO = [{"role": "user", "content": "Hello"}]
LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def render(source: str, messages: list[dict[str, Any]] = HELLO, **variables: Any) -> str:
    return ChatTemplate(source, PATH, {"bos_token": "<s>"}).render(messages, **variables)


def test_a_template_sees_messages_tokens_and_variables() -> None:
    """Messages, special tokens, tools, the generation flag and extra variables all arrive."""
    source = (
        "{{ bos_token }}"
        + LOOP
        + "{% if tools %}{{ tools[0].name }}{% endif %}"
        + "{% if add_generation_prompt %}>{% endif %}{{ enable_thinking }}"
    )
    assert render(source, tools=[{"name": "f"}], enable_thinking=False) == ("<s><user>Hellof>False")
    assert render(source, add_generation_prompt=False, enable_thinking=1) == "<s><user>Hello1"


def test_blocks_leave_no_lines_and_loop_controls_work() -> None:
    """Lines that hold only a block vanish; break and continue exist."""
    source = "{% for i in range(9) %}\n  {% if i == 2 %}\n{% break %}\n  {% endif %}\n{{ i }}\n"
    source += "{% endfor %}"
    assert render(source) == "0\n1\n"


def test_json_is_not_escaped() -> None:
    """tojson keeps quotes, angle brackets and other scripts as they are."""
    value = {"b": "<日本> & 'x'", "a": 1}
    assert render("{{ v | tojson }}", v=value) == '{"b": "<日本> & \'x\'", "a": 1}'
    assert render("{{ v | tojson(indent=2) }}", v=[1]) == "[\n  1\n]"


def test_the_date_is_now() -> None:
    """strftime_now formats the present day."""
    before = datetime.now().strftime("%Y-%m-%d")
    shown = render("{{ strftime_now('%Y-%m-%d') }}")
    assert shown in (before, datetime.now().strftime("%Y-%m-%d"))


def test_generation_blocks_render_their_text() -> None:
    """The tags that mark assistant text for training change nothing."""
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHellob"


def test_a_refusal_carries_the_templates_words() -> None:
    """raise_exception in a template, e.g. for a system role, becomes a typed refusal."""
    source = (
        "{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
    )
    with pytest.raises(ChatTemplateRefusal, match="System role not supported") as caught:
        render(source, [{"role": "system", "content": "Be brief"}, *HELLO])
    assert caught.value.problem == "System role not supported"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% if %}", "line 1"),
        ("{{ messages | nofilter }}", "nofilter"),
        ("{{ none.field.deeper }}", "UndefinedError"),
        ("{{ 1 + 'x' }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_broken_template_is_named(source: str, says: str) -> None:
    """Syntax errors and failures while rendering name the file and what went wrong."""
    with pytest.raises(ChatTemplateError, match=says) as caught:
        render(source)
    assert str(PATH) in str(caught.value)
    assert not isinstance(caught.value, ChatTemplateRefusal)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{% set n = namespace() %}{{ n.__init__.__globals__.x }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    """Python's insides and the caller's objects are out of a template's reach."""
    with pytest.raises(ChatTemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_cannot_grow_without_bound(source: str) -> None:
    """Huge repetitions, powers and nested loops end with an error, not with the machine."""
    with pytest.raises(ChatTemplateError, match="SecurityError"):
        render(source)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendering longer than the bound is refused."""
    monkeypatch.setattr(chat_template, "MAX_PROMPT_CHARACTERS", 100)
    assert len(render("{{ 'x' * 100 }}")) == 100
    with pytest.raises(ChatTemplateError, match="more than 100 characters"):
        render("{% for i in range(11) %}{{ 'x' * 10 }}{% endfor %}")


def test_a_template_can_be_used_again_after_its_bounds_were_spent() -> None:
    """Each rendering has its own budget of loop steps."""
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}ok", PATH)
    assert {template.render(HELLO) for _ in range(12)} == {"ok"}


def test_text_parts_are_joined() -> None:
    """Content as a list of text parts reads like the same text as a string."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert render(LOOP, [{"role": "user", "content": parts}]) == "<user>Hello"


def test_other_parts_are_refused_by_type() -> None:
    """A part that is not text is named in a typed error."""
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(UnsupportedError, match="image_url"):
        render(LOOP, [{"role": "user", "content": parts}])


@pytest.mark.parametrize("message", [{"content": None}, {}], ids=["null", "absent"])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LOOP, "<assistant>"),
        ("{% for m in messages %}{{ '[' + m['content'] + ']' }}{% endfor %}", "[]"),
        (
            "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}"
            "{% endif %}{% endfor %}",
            "f",
        ),
        (
            "{% for m in messages %}{% if m.content is string %}ok{% else %}"
            "{{ raise_exception('Invalid content type') }}{% endif %}{% endfor %}",
            "ok",
        ),
    ],
    ids=["prints", "adds", "looks for null", "demands a string"],
)
def test_tool_calls_without_content(message: dict[str, Any], source: str, expected: str) -> None:
    """History with tool calls and no content renders, whatever the template makes of null."""
    history = [{"role": "assistant", "tool_calls": [CALL], **message}]
    assert render(source, history) == expected


def test_messages_stay_as_they_were() -> None:
    """Rendering does not change the caller's messages."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    render(LOOP, messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ messages[0].tool_calls[0].function.arguments | tojson }}", '{"a": "é"}'),
        ("{{ 'x' + messages[0].tool_calls[0].function.arguments }}", 'x{"a": "é"}'),
        (
            "{{ messages[0].content + messages[0].tool_calls[0].function.arguments }}",
            '{"a": "é"}',
        ),
    ],
)
def test_arguments_in_the_form_that_the_template_wants(source: str, shown: str) -> None:
    """Arguments are objects, or JSON text to a template that adds them to a string."""
    call = {"function": {"name": "f", "arguments": {"a": "é"}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert ChatTemplate(source, Path("here")).render([message]) == shown
