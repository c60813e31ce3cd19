"""Response formats as grammars, and schemas that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.engine.grammar import LONGEST_GRAMMAR, json_object_grammar, json_schema_grammar
from mlxcel.errors import GrammarError
from mlxcel.testing.tiny.tokenizer import EOS, write_tokenizer

Accepts = Callable[[str, str], bool]


@pytest.fixture
def accepts(tmp_path: Path) -> Accepts:
    """Whether a text is a whole text of a grammar; each of its bytes is a token."""
    from llguidance import LLMatcher, LLTokenizer

    write_tokenizer(tmp_path)
    tokenizer = LLTokenizer((tmp_path / "tokenizer.json").read_text(), eos_token=[EOS])

    def check(grammar: str, text: str) -> bool:
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        fits = all(matcher.consume_token(byte) for byte in text.encode())
        return fits and matcher.is_accepting()

    return check


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("{}", True),
        ('{"a":[1,-2.5e3,null,{"b":"é\\n"}]}', True),
        ('{"a": 1}', False),
        ("[]", False),
        ('"text"', False),
        ("{", False),
    ],
)
def test_any_object(accepts: Accepts, text: str, fits: bool) -> None:
    """An object of any content, without white space between tokens, and nothing else."""
    assert accepts(json_object_grammar(), text) is fits


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"zebra": {"type": "integer"}, "apple": {"enum": ["red", "grün"]}},
    "required": ["zebra", "apple"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"zebra":1,"apple":"grün"}', True),
        ('{"apple":"red","zebra":1}', False),
        ('{"zebra":1,"apple":"blue"}', False),
        ('{"zebra":1}', False),
        ('{"zebra":1.5,"apple":"red"}', False),
    ],
)
def test_a_schema(accepts: Accepts, text: str, fits: bool) -> None:
    """What the schema says, the properties in its order."""
    assert accepts(json_schema_grammar(SCHEMA), text) is fits


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"contains": {"type": "string"}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"$ref": "https://example.com/schema.json"}, "example.com"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "format": "bogus"}, "bogus"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "greater than maximum"),
        ({"enum": []}, "empty"),
        ({"type": "object", "x-guidance": {"whitespace_flexible": True}}, "x-guidance"),
        ({"const": float("nan")}, "JSON compliant"),
        ({"const": "\ud800"}, "ud800"),
        ({"const": {1, 2}}, "set"),
        ({"const": "x" * LONGEST_GRAMMAR}, "characters"),
        ({"type": "integer", "multipleOf": 999_983}, "multiple"),
        ({"type": "number", "multipleOf": 0.0999_983}, "multiple"),
        ({"allOf": [{"type": "integer", "multipleOf": m} for m in (911, 919)]}, "multiple"),
        (
            {"anyOf": [{"type": "integer", "multipleOf": 10**4000 + m} for m in (1, 3)]},
            "out of range",
        ),
        ({"type": "integer", "multipleOf": True}, "multipleOf"),
        ({"type": "integer", "multipleOf": 0}, "multiple"),
    ],
)
def test_what_cannot_be_enforced_is_refused(schema: dict[str, Any], reason: str) -> None:
    """Nothing in a schema is ignored: the error names what is wrong with it, in one line."""
    with pytest.raises(GrammarError, match=reason) as caught:
        json_schema_grammar(schema)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("multiple", "fits"), [(0.01, "7.25"), (500, "1500"), (365, "730")])
def test_multiples_of_a_few_digits(accepts: Accepts, multiple: float, fits: str) -> None:
    """Multiples of what people write are enforced; where the point stands makes no difference."""
    grammar = json_schema_grammar({"type": "number", "multipleOf": multiple})
    assert accepts(grammar, fits)
    assert not accepts(grammar, f"{fits}1" if "." in fits else f"{fits[:-1]}3")


def test_depth_is_bounded() -> None:
    """A schema nested without end is refused, not followed."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError, match="recursion"):
        json_schema_grammar(schema)


def test_the_server_process_stays_light() -> None:
    """Making a grammar imports neither MLX nor mlx_lm nor transformers."""
    source = (
        "import sys\n"
        "from mlxcel.engine.grammar import json_object_grammar\n"
        "assert 'llguidance' not in sys.modules\n"
        "json_object_grammar()\n"
        "assert not {'mlx', 'mlx_lm', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_a_grammar_is_one_string_that_json_can_hold() -> None:
    """It travels in the header of a step."""
    grammar = json_schema_grammar(SCHEMA)
    assert json.loads(json.dumps(grammar)) == grammar
