"""Rendering a checkpoint's chat template: messages in, the prompt's text out.

A template is a program that came with a download, so it runs in jinja2's immutable
sandbox, and what it may produce is bounded. It sees what templates on the hub expect:
``messages``, ``tools``, ``documents``, ``add_generation_prompt``, the special tokens,
``raise_exception``, ``strftime_now`` and a ``tojson`` that does not escape HTML.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mlxcel.errors import ChatTemplateError, ChatTemplateRefusal, UnsupportedError

MAX_PROMPT_CHARACTERS = 64 * 2**20
"""A rendering longer than this is refused; no context window holds as much."""

MAX_LOOP_STEPS = 1_000_000
"""How many values all ``range()`` calls of one rendering may count up, together."""

_MAX_PRODUCT = 2**20  # of a repetition's length, or of a power's exponent and base in bits

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template; rendering it does not change it, so threads can share it.

    Args:
        source: The template's jinja2 text.
        path: The file it came from, for error texts.
        special_tokens: What the template sees as ``bos_token``, ``eos_token`` and so on.

    Attributes:
        source: As given.

    Raises:
        ChatTemplateError: The template's syntax is wrong.
    """

    def __init__(
        self, source: str, path: Path, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        self.path = path
        self.special_tokens = dict(special_tokens or {})
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(path, f"line {error.lineno}: {error.message}.") from error
        except Exception as error:  # e.g. constants that cannot be folded
            raise ChatTemplateError(path, _described(error)) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages``.

        Content may be a string, a list of text parts (joined here), or null or absent beside
        tool calls. Templates disagree about the last: some look for null, others add the
        content to a string. So null is tried first, and where that fails an empty string. The
        arguments of tool calls may be objects, which most templates want; where that fails,
        they are tried as JSON text.

        Args:
            messages: Mappings with ``role`` and ``content``, oldest first.
            tools: Tool descriptions (JSON schema), for templates that know tools.
            add_generation_prompt: End with the opening of the assistant's turn.
            variables: Further variables of the template, e.g. ``enable_thinking``.

        Raises:
            ChatTemplateRefusal: The template refuses these messages, in its own words.
            ChatTemplateError: The template fails, or its output passes a bound.
            UnsupportedError: A content part is not text.
        """
        variables |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        plain = [_with_plain_content(message) for message in messages]
        *others, last = _forms(plain)
        for form in others:
            with suppress(ChatTemplateError):
                return self._render(form, variables)
        return self._render(last, variables)

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        context = {
            "documents": None,
            **self.special_tokens,
            "range": _bounded_range(),
            **variables,
            "messages": messages,
        }
        parts: list[str] = []
        left = MAX_PROMPT_CHARACTERS
        try:
            for part in self._template.generate(context):
                left -= len(part)
                if left < 0:
                    raise SecurityError(f"more than {MAX_PROMPT_CHARACTERS} characters of output")
                parts.append(part)
        except _Refused as refusal:
            raise ChatTemplateRefusal(self.path, str(refusal.message)) from refusal
        except Exception as error:  # whatever a foreign program may raise
            raise ChatTemplateError(self.path, _described(error)) from error
        return "".join(parts)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}."


def _with_plain_content(message: Message) -> dict[str, Any]:
    """A copy of ``message`` whose ``content`` is a string or None."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "".join(map(_text_of_part, content))
    return {**message, "content": content}


def _forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """``messages`` as they are, then with what templates disagree about the other way."""
    forms = [messages]
    for change in (_without_null, _with_json_arguments):
        forms += [other for form in forms if (other := list(map(change, form))) != form]
    return forms


def _without_null(message: dict[str, Any]) -> dict[str, Any]:
    return message if message["content"] is not None else {**message, "content": ""}


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)):
        return message
    return {**message, "tool_calls": [_with_json_argument(call) for call in calls]}


def _with_json_argument(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}


def _text_of_part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UnsupportedError(
        f"a message has a content part of type {kind!r}, and mlxcel reads text only.",
        'Send content as a string, or as parts of the form {"type": "text", "text": "…"}.',
    )


class _Refused(jinja2.TemplateError):
    """Raised by a template through ``raise_exception``."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _nothing_for_null(value: Any) -> Any:
    """``{{ message.content }}`` without content prints nothing, not the word None."""
    return "" if value is None else value


def _bounded_range() -> Callable[..., range]:
    """A ``range`` for one rendering: nested loops share one budget of steps."""
    left = MAX_LOOP_STEPS

    def bounded(*args: int) -> range:
        nonlocal left
        steps = range(*args)
        left -= len(steps)
        if left < 0 or len(steps) > MAX_RANGE:
            raise SecurityError(f"loops over more than {MAX_LOOP_STEPS} range() values")
        return steps

    return bounded


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """``dict`` as a function, so that a template does not get hold of the class."""
    return dict(*args, **kwargs)


class _PlainNamespace(Namespace):
    """A ``namespace`` that refuses names such as ``__class__``, by which objects pose as others."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` can be a name in it
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks text for training: rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (the base class wants it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which also stops ``"x" * 10**9`` and ``9 ** (9 ** 9)`` before they allocate."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size_of(operator, left, right) > _MAX_PRODUCT:
            raise SecurityError(f"the result of {operator!r} would be too large")
        return super().call_binop(context, operator, left, right)


def _size_of(operator: str, left: Any, right: Any) -> int:
    """The length of a repetition, the bits of a product or a power; 0 where it cannot grow."""
    if operator == "**":
        both = isinstance(left, int) and isinstance(right, int)
        return left.bit_length() * right if both else 0
    for repeated, count in ((left, right), (right, left)):
        if isinstance(repeated, (str, list, tuple)) and isinstance(count, int):
            return len(repeated) * count
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    return 0


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        finalize=_nothing_for_null,
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        namespace=_PlainNamespace,
        dict=_dict,
    )
    return environment


_ENVIRONMENT = _make_environment()
