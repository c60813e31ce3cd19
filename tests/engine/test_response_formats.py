"""Grammars and log-probabilities through the engine, its stages and their batches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from mlxcel.engine.engine import Engine, Settings
from mlxcel.engine.generation import Generation
from mlxcel.engine.grammar import json_object_grammar, json_schema_grammar
from mlxcel.engine.limits import Limits, credits_for
from mlxcel.engine.local import open_model, running
from mlxcel.engine.sequence import Output
from mlxcel.engine.slot import Request
from mlxcel.errors import GrammarFailed, MlxcelError
from mlxcel.pipeline.operations import Sampling
from mlxcel.pipeline.step import Logprobs
from mlxcel.pipeline.workers import WorkerPipeline
from mlxcel.plugins import Plugins

WAIT = 60.0
STAGES = 3

PERSON = json_schema_grammar(
    {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "kind": {"enum": ["a person", "än ünd", 7, None]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["age", "kind", "tags"],
        "additionalProperties": False,
    }
)
"""Its texts are short, whatever a model without sense draws."""


@attrs.define
class Answer:
    """All that came for one request."""

    text: str = ""
    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[Logprobs] = attrs.field(factory=list)
    reason: str | None = None
    error: MlxcelError | None = None
    cached: int = 0

    def add(self, output: Output) -> None:
        assert len(output.logprobs) in (0, len(output.tokens))
        self.text += output.text
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.reason, self.error, self.cached = output.finish_reason, output.error, output.cached


class Bench:
    """A tiny model in three stages; each :meth:`answers` has an engine of its own."""

    def __init__(self, path: Path, pipeline: WorkerPipeline) -> None:
        self.model = open_model(path, Plugins.discover(environ={}), size=STAGES)
        self.pipeline = pipeline

    def answers(
        self, requests: Sequence[Request], *, parallel: int = 32, prefixes: bool = False
    ) -> dict[int, Answer]:
        """What each request gets; with ``parallel`` 1 they run one after another."""
        answers = {request.index: Answer() for request in requests}

        def deliver(outputs: list[Output]) -> None:
            for output in outputs:
                answers[output.request].add(output)

        engine = Engine(
            self.pipeline,
            [],
            self.model.tokenizer,
            Settings(Limits(parallel=parallel, chunk=16)),
            deliver,
            kinds=self.model.cache_kinds if prefixes else None,
        )
        engine.start()
        for request in requests:
            engine.submit(request)
        engine.stop(drain=WAIT)
        assert engine.error is None
        return answers


@contextmanager
def bench(path: Path, *, wire: bool = False) -> Iterator[Bench]:
    """Credits for the largest engine that will use the pipeline."""
    model = open_model(path, Plugins.discover(environ={}), size=STAGES)
    count = credits_for(STAGES, Limits())
    with running(model, credits=count, timeout=WAIT, wire=wire) as pipeline:
        yield Bench(path, pipeline)


def mixed(seed: str, count: int) -> list[Request]:
    """Requests of all kinds: every feature with and without every other."""
    rng = random.Random(seed)

    def sampling(index: int) -> Sampling:
        biased = rng.random() < 0.3
        return Sampling(
            temperature=rng.choice([0.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            seed=index,
            repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            bias_tokens=(65, 66) if biased else (),
            bias_values=(3.0, -3.0) if biased else (),
            logprobs=rng.choice([None, None, 0, 3, 20]),
        )

    return [
        Request(
            index,
            tuple(rng.randrange(250) for _ in range(rng.choice([1, 2, 5, 11, 17, 33]))),
            rng.choice([4, 60]),
            sampling(index),
            grammar=rng.choice([None, None, PERSON, json_object_grammar()]),
        )
        for index in range(count)
    ]


def check_person(text: str) -> None:
    value: dict[str, Any] = json.loads(text)
    assert list(value) == ["age", "kind", "tags"]
    assert value["age"] in range(131)
    assert value["kind"] in ["a person", "än ünd", 7, None]
    assert all(isinstance(tag, bool) for tag in value["tags"]) and len(value["tags"]) <= 3


def close(items: Collection[Logprobs]) -> list[object]:
    """For comparing values that a batch may have added up in another order."""
    return [(pytest.approx(i.drawn, abs=1e-4), pytest.approx(i.values, abs=1e-4)) for i in items]


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_mixed_requests_equal_their_single_runs(tiny: Callable[..., Path], name: str) -> None:
    """64 requests over 3 stages, with and without grammar, log-probabilities, penalties, biases."""
    requests = mixed(name, 64)
    with bench(tiny(name), wire=True) as stages:
        together = stages.answers(requests)
        alone = stages.answers(requests, parallel=1)
    finished = 0
    for request in requests:
        mine, single = together[request.index], alone[request.index]
        assert (mine.text, mine.tokens, mine.reason) == (single.text, single.tokens, single.reason)
        assert [(i.drawn, i.values) for i in mine.logprobs] == close(single.logprobs)
        asked = request.sampling.logprobs
        assert len(mine.logprobs) == (0 if asked is None else len(mine.tokens))
        assert all(len(item.ids) == asked for item in mine.logprobs)
        if request.grammar is not None and mine.reason == "stop":
            finished += 1
            value = json.loads(mine.text)
            assert isinstance(value, dict)
            if request.grammar == PERSON:
                check_person(mine.text)
    assert finished >= 8, "the formats that ended are what is tested here"


def test_a_plain_request_does_not_notice_a_schema(tiny: Callable[..., Path]) -> None:
    """Tokens and log-probabilities are the same to the last bit beside a grammar and without."""
    plain = [
        Request(i, tuple(b"some words"), 20, Sampling(0.8, seed=i, logprobs=5)) for i in range(4)
    ]
    other = Request(9, tuple(b"some words"), 20, Sampling(0.8, seed=9))
    with bench(tiny("llama")) as stages:
        without = stages.answers([*plain, other])
        beside = stages.answers([*plain, attrs.evolve(other, grammar=PERSON)])
    assert beside[9].text != without[9].text
    for request in plain:
        assert beside[request.index] == without[request.index]


def test_a_grammar_that_fails_fails_alone(tiny: Callable[..., Path]) -> None:
    """Its request ends with an error that says why, the others of its batch go on."""
    good = [
        Request(i, tuple(b"abc"), 60, Sampling(logprobs=1), grammar=(None, PERSON)[i])
        for i in range(2)
    ]
    bad = Request(2, tuple(b"abc"), 60, Sampling(logprobs=1), grammar="start: nowhere")
    with bench(tiny("llama"), wire=True) as stages:
        answers = stages.answers([bad, *good])
        alone = stages.answers(good)
        with pytest.raises(GrammarFailed, match="nowhere"):
            list(Generation(stages.pipeline, [bad], end_tokens=(257,), rows=1, chunk=16))
    assert answers[2].reason == "error"
    assert isinstance(answers[2].error, GrammarFailed)
    assert "nowhere" in str(answers[2].error)
    assert (answers[2].tokens, answers[2].logprobs) == ([], [])
    for request in good:
        assert answers[request.index].tokens == alone[request.index].tokens
        assert answers[request.index].error is None


def test_a_known_beginning_has_a_new_text(tiny: Callable[..., Path]) -> None:
    """A prompt that starts from a remembered one begins its own grammar, or none."""
    prompt = tuple(b"a long beginning that is worth remembering")
    requests = [
        Request(i, (*prompt, *tail), 60, Sampling(0.8, seed=i), grammar=grammar)
        for i, (tail, grammar) in enumerate(
            [(b"", PERSON), (b"", PERSON), (b"more", PERSON), (b"", None), (b"", PERSON)]
        )
    ]
    with bench(tiny("llama")) as stages:
        known = stages.answers(requests, parallel=1, prefixes=True)
        fresh = stages.answers(requests, parallel=1)
    assert all(known[i].cached > 0 for i in range(1, 5))
    for request in requests:
        assert known[request.index].text == fresh[request.index].text
        if request.grammar is not None:
            check_person(known[request.index].text)


def test_end_tokens_that_are_ignored(tiny: Callable[..., Path]) -> None:
    """A text that is complete goes on with nothing but end tokens, up to its last token."""
    request = Request(0, tuple(b"abc"), 80, Sampling(), ignore_end=True, grammar=PERSON)
    with bench(tiny("llama")) as stages:
        answer = stages.answers([request])[0]
    check_person(answer.text)
    assert (answer.reason, len(answer.tokens)) == ("length", 80)
    assert set(answer.tokens[-5:]) <= stages.model.tokenizer.eos_ids


@pytest.mark.parametrize("grammar", [None, PERSON])
def test_choices_differ_only_where_tokens_are_drawn(
    tiny: Callable[..., Path], grammar: str | None
) -> None:
    """Greedy choices of one request are equal; drawn ones differ, the first as if alone."""

    def choices(temperature: float, count: int) -> list[str]:
        requests = [
            Request(n, tuple(b"abc"), 60, Sampling(temperature, seed=7, choice=n), grammar=grammar)
            for n in range(count)
        ]
        return [answer.text for answer in stages.answers(requests).values()]

    with bench(tiny("llama")) as stages:
        assert len(set(choices(0.0, 4))) == 1
        drawn = choices(1.5, 4)
        assert len(set(drawn)) == 4
        assert drawn[0] == choices(1.5, 1)[0]
