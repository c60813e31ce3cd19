"""What response formats mean as grammars, checked before a request is taken; no MLX here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from mlxcel.errors import GrammarError

LONGEST_GRAMMAR = 1 << 18
"""Characters of a grammar; it travels in the header of a step."""

MOST_REMAINDERS = 1 << 16
"""What all ``multipleOf`` of a schema may come to: the lexer of the last stage has a state for each
remainder, and nothing else bounds how long it takes to make them."""

_OPTIONS = "x-guidance"
_WAY_OUT = "Correct the schema, or ask for any JSON object."


def json_object_grammar() -> str:
    """Any JSON object, without white space between its tokens; in llguidance's notation."""
    return json_schema_grammar({"type": "object"})


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    """The JSON values that ``schema`` describes, properties in its order, without white space.

    Raises:
        GrammarError: It is no schema, uses keywords that cannot be enforced, describes nothing,
            or is too large.
    """
    if _OPTIONS in schema:
        raise GrammarError(f"'{_OPTIONS}' in a JSON schema is not supported.", "Leave it out.")
    try:
        # The order of properties is that of the text.
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"The JSON schema cannot be read: {error}.", _WAY_OUT) from error
    if len(text) > LONGEST_GRAMMAR:
        raise GrammarError(
            f"The JSON schema has {len(text)} characters; {LONGEST_GRAMMAR} are allowed.",
            "Use a smaller one.",
        )
    if math.lcm(*_multiples(schema)) > MOST_REMAINDERS:
        raise GrammarError(
            f"The least common multiple of all 'multipleOf' in the JSON schema is above "
            f"{MOST_REMAINDERS}.",
            "Use smaller ones.",
        )
    return _compiled(text)


def _multiples(schema: Mapping[str, Any]) -> Iterator[int]:
    """The digits of every ``multipleOf``; where the point stands costs nothing."""
    rest: list[Any] = [schema]
    while rest:
        match rest.pop():
            case dict() as found:
                number = found.get("multipleOf")
                if type(number) in (int, float):
                    yield int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits)))
                rest += found.values()
            case list() as found:
                rest += found


@lru_cache(maxsize=64)
def _compiled(schema: str) -> str:
    """The grammar of a schema, once it is known to be one."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False, "lenient": False}
        )
    except ValueError as error:
        raise _refusal(str(error)) from error
    limits = LLParserLimits(verbose_errors=False)
    failed, problems = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if failed or problems:
        raise _refusal(problems[0])
    return grammar


def _refusal(reason: str) -> GrammarError:
    said = " ".join(reason.split()).rstrip(".")
    return GrammarError(f"The JSON schema cannot be used: {said}.", _WAY_OUT)
