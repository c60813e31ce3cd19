"""Matchers: what may come next, and what happens where nothing may."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxcel.engine.grammar import json_schema_grammar
from mlxcel.pipeline.operations import Copy, Extend, Extract, Filter, Merge, New, Sampling
from mlxcel.pipeline.step import FAILED_GRAMMAR
from mlxcel.stage.batch import BatchTable, Row
from mlxcel.stage.grammar import Grammars, Matcher
from mlxcel.stage.sampler import sample
from mlxcel.testing.tiny.tokenizer import EOS, PAD, VOCAB, write_tokenizer

ENDS = (EOS, PAD)
DIGIT = json_schema_grammar({"type": "integer", "minimum": 1, "maximum": 12})
"""1 to 12: after a 1 the text is complete, and can go on."""

EMPTY = json_schema_grammar({"type": "object", "additionalProperties": False})


@pytest.fixture
def grammars(tmp_path: Path) -> Grammars:
    """On the tiny tokenizer, whose ids are bytes."""
    write_tokenizer(tmp_path)
    return Grammars(tmp_path / "tokenizer.json")


def allowed(matcher: Matcher, width: int = VOCAB) -> list[int]:
    """The ids that may come next."""
    mask = matcher.allowed(width)
    assert mask is not None, matcher.problem
    assert mask.shape == (width,)
    assert mask.dtype == mx.bool_
    return [int(id) for id in np.flatnonzero(np.array(mask))]


def test_ends_are_allowed_exactly_where_the_text_is_complete(grammars: Grammars) -> None:
    """All end tokens or none; where nothing else can follow, they alone, also after them."""
    matcher = grammars.matcher(DIGIT, ENDS)
    assert allowed(matcher) == list(b"123456789")
    matcher.take(ord("1"))
    assert allowed(matcher) == [*b"012", *ENDS]
    matcher.take(ord("2"))
    assert allowed(matcher) == [*ENDS]
    for end in (PAD, EOS):  # who ignores end tokens goes on with them
        matcher.take(end)
        assert allowed(matcher) == [*ENDS]
    assert matcher.problem is None


def test_matchers_do_not_know_each_other(grammars: Grammars) -> None:
    """Two of one grammar, and a deep copy, each go their own way, whoever was asked before."""
    one, two = (grammars.matcher(DIGIT, ENDS) for _ in range(2))
    assert allowed(one) == list(b"123456789")
    one.take(ord("1"))
    copied = copy.deepcopy(one)
    copied.take(ord("0"))
    assert allowed(one) == [*b"012", *ENDS]
    assert allowed(two) == list(b"123456789")
    assert allowed(copied) == [*ENDS]


@pytest.mark.parametrize("width", [200, VOCAB, VOCAB + 1, 1000])
def test_the_mask_has_the_width_of_the_logits(grammars: Grammars, width: int) -> None:
    """Logits may be wider than the tokenizer, whose ids alone are allowed, or narrower."""
    matcher = grammars.matcher(EMPTY, ENDS)
    assert allowed(matcher, width) == [ord("{")]


def test_an_end_token_may_be_unknown_to_the_tokenizer(grammars: Grammars) -> None:
    """A model may also end with an id behind the tokenizer's last one, which is never drawn."""
    matcher = grammars.matcher(DIGIT, (EOS, 299))
    matcher.take(ord("9"))
    assert allowed(matcher, 300) == [EOS]


def test_the_model_lacks_what_must_follow(tmp_path: Path) -> None:
    """Where no token goes on, that is a problem, not an end of the text."""
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["zzz"] = vocab.pop("}")
    file.write_text(json.dumps(content))
    matcher = Grammars(file).matcher(EMPTY, ENDS)
    assert allowed(matcher) == [ord("{")]
    matcher.take(ord("{"))
    assert matcher.allowed(VOCAB) is None
    assert matcher.problem is not None


def test_logits_without_what_must_follow(grammars: Grammars) -> None:
    """A tokenizer that knows more than the model: what the model lacks cannot be drawn."""
    matcher = grammars.matcher(EMPTY, ENDS)
    assert matcher.allowed(100) is None
    assert matcher.problem == "the model has none of the tokens that could follow"


@pytest.mark.parametrize(
    ("grammar", "ends", "problem"),
    [
        ("start: nowhere", ENDS, "nowhere"),
        ("{}", ENDS, "grammars"),
        (json_schema_grammar({"$ref": "#"}), ENDS, "no text matches it"),
        (DIGIT, (), "end token"),
        (DIGIT, (299,), "end token"),
    ],
)
def test_what_cannot_begin_is_a_problem(
    grammars: Grammars, grammar: str, ends: tuple[int, ...], problem: str
) -> None:
    """Nothing is raised, so that the other rows of the step are not hurt."""
    matcher = grammars.matcher(grammar, ends)
    assert matcher.allowed(VOCAB) is None
    assert problem in (matcher.problem or "")
    matcher.take(5)  # of which nobody takes notice


@pytest.mark.parametrize("content", [None, "{}", "no JSON"])
def test_a_tokenizer_that_cannot_be_read_is_a_problem(tmp_path: Path, content: str | None) -> None:
    """The file is named; it is read only when a grammar comes."""
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    matcher = Grammars(file).matcher(DIGIT, ENDS)
    assert matcher.allowed(VOCAB) is None
    assert str(file) in (matcher.problem or "")


def logits(*best: str) -> mx.array:
    """[rows, vocab] logits whose best token is each of these characters."""
    values = mx.random.normal((len(best), VOCAB), key=mx.random.key(3))
    values[mx.arange(len(best)), mx.array([ord(c) for c in best])] = 20.0
    return values


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_is_allowed_is_drawn(grammars: Grammars, temperature: float) -> None:
    """Greedy or not, biased or not, a token outside of the grammar never comes."""
    sampling = Sampling(temperature, bias_tokens=(ord("x"),), bias_values=(100.0,))
    for position in range(20):
        row = Row(0, sampling, position, matcher=grammars.matcher(DIGIT, ENDS))
        [token] = sample(logits("x"), [row])
        assert chr(token) in "123456789"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_rows_are_not_touched(grammars: Grammars, temperature: float) -> None:
    """Beside a row with a grammar, and beside one that fails, a plain row draws what it draws."""
    plain = Row(0, Sampling(temperature, seed=5), 10)
    alone = sample(logits("x", "y", "z")[:1], [plain])
    matched = Row(1, Sampling(), 10, matcher=grammars.matcher(DIGIT, ENDS))
    failing = Row(2, Sampling(), 10, matcher=grammars.matcher("start: nowhere", ENDS))
    first, second, third = sample(logits("x", "y", "z"), [plain, matched, failing])
    assert [first] == alone
    assert chr(second) in "123456789"
    assert third == FAILED_GRAMMAR


def test_matchers_move_with_their_rows(grammars: Grammars) -> None:
    """Merged, extended and filtered, a row keeps its place; extracts and copies go on alone."""
    batches = BatchTable(list, grammars.matcher)
    for handle, grammar in ((1, DIGIT), (2, None), (3, EMPTY), (4, DIGIT)):
        batches.apply(New(handle, 10 * handle, Sampling(), grammar=grammar, ends=ENDS))
    batches.apply(Merge(0, (1, 2, 3)))
    batches[0].note([ord("1"), 0, ord("{")])
    batches.apply(Merge(5, (4,)))
    batches.apply(Extend(0, 5))
    batches.apply(Extract(6, 0, 0))
    batches.apply(Copy(7, 0))
    batches[6].note([ord("0")])
    batches[7].note([ord("2"), 0, ord("}"), ord("9")])

    def follow(handle: int) -> list[list[int] | None]:
        return [row.matcher and allowed(row.matcher) for row in batches[handle].rows]

    assert follow(6) == [[*ENDS]]
    assert follow(7) == [[*ENDS], None, [*ENDS], [*ENDS]]
    batches.apply(Filter(0, (3, 1, 2, 0)))
    assert follow(0) == [list(b"123456789"), None, [ord("}")], [*b"012", *ENDS]]


def test_stages_that_draw_nothing_keep_no_matcher() -> None:
    """Only the last stage reads a grammar."""
    batches = BatchTable(list)
    batches.apply(New(1, 10, Sampling(), grammar=DIGIT, ends=ENDS))
    assert batches[1].rows[0].matcher is None


def test_a_row_that_starts_from_another_begins_its_grammar(grammars: Grammars) -> None:
    """The caches are those of the source, the text is new."""
    batches = BatchTable(list, grammars.matcher)
    batches.apply(New(1, 10, Sampling(), grammar=DIGIT, ends=ENDS))
    batches[1].note([ord("1")])
    batches.apply(New(2, 20, Sampling(), (), 1, EMPTY, ENDS))
    matcher = batches[2].rows[0].matcher
    assert matcher is not None
    assert allowed(matcher) == [ord("{")]


def test_equal_grammars_are_compiled_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of one grammar share the work as long as one of them lives, and no longer."""
    import llguidance

    compiled: list[str] = []
    real: Callable[..., llguidance.LLMatcher] = llguidance.LLMatcher

    def counting(tokenizer: llguidance.LLTokenizer, grammar: str, **rest: object) -> object:
        compiled.append(grammar)
        return real(tokenizer, grammar, **rest)

    monkeypatch.setattr(llguidance, "LLMatcher", counting)
    matchers = [grammars.matcher(grammar, ENDS) for grammar in (DIGIT, EMPTY, DIGIT, DIGIT)]
    assert compiled == [], "nobody has asked yet"
    for matcher in matchers:
        allowed(matcher)
    assert compiled == [DIGIT, EMPTY]
    matchers.clear()
    del matcher
    allowed(grammars.matcher(DIGIT, ENDS))
    assert compiled == [DIGIT, EMPTY, DIGIT]
