"""What response formats mean as grammars, checked before a request is taken; no MLX here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from mlxcel.errors import GrammarError

LONGEST_GRAMMAR = 1 << 18
"""Characters of a grammar; it travels in the header of a step."""

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
    return _compiled(text)


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
