"""The engine's bench up to the clients' sockets, and the pipeline without a model under it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel.bench.null_pipeline import NullPipeline
from mlxcel.bench.streaming import READ_COUNT, STEPS, WARM_UP, Pace, visible_tokens
from mlxcel.checkpoint.config import read_config
from mlxcel.engine.tokenizer import Tokenizer, load_tokenizer
from mlxcel.pipeline.operations import Extend, Filter, Merge, New, Release, Sampling
from mlxcel.pipeline.step import Step, Tokens


@pytest.fixture
def tokenizer(tiny: Callable[..., Path]) -> Tokenizer:
    folder = tiny("llama")
    return load_tokenizer(folder, read_config(folder))


def tokens_of(pipeline: NullPipeline) -> tuple[int, ...]:
    """The next answer's tokens; the engine's look after each may bring nothing."""
    answer = pipeline.poll() or pipeline.poll()
    assert isinstance(answer, Tokens)
    return answer.tokens


def test_rows_follow_the_operations() -> None:
    """A step that samples is answered with a token for each row of its batch."""
    pipeline = NullPipeline(2, 4, range(100))
    new = [New(handle, handle, Sampling()) for handle in range(4)]
    steps = [
        (0, (*new[:2], Merge(5, (0, 1))), False),
        (5, (), True),
        (2, (new[2],), True),
        (5, (Extend(5, 2),), True),
        (5, (Filter(5, (1, 2)),), True),
        (5, (Release(5),), True),
    ]
    made = []
    for seq, (slot, operations, sample) in enumerate(steps):
        pipeline.submit(Step(seq, slot, operations, {}, sample))
        made.append(len(tokens_of(pipeline)))
    assert made == [0, 2, 1, 3, 2, 0]
    assert pipeline.steps == 4


def test_one_answer_a_round() -> None:
    """After an answer with tokens the engine is sent away once, and rung for the next one."""
    rung = []
    pipeline = NullPipeline(1, 4, range(10))
    pipeline.listen(lambda: rung.append(True))
    for seq in range(2):
        pipeline.submit(Step(seq, seq, (New(seq, seq, Sampling()),), {}, True))
    before = len(rung)
    assert pipeline.poll() is not None
    assert pipeline.poll() is None
    assert len(rung) == before + 1
    assert pipeline.poll() is not None


def test_the_pace() -> None:
    """An answer waits until all events before it are read, and only full steps are timed."""
    reading, writing = os.pipe()
    ends: list[bool] = []
    pace = Pace(3, lambda: ends.append(True))
    pace.read_counts = reading
    pace(1)  # nothing came before it
    for _ in range(WARM_UP + STEPS):
        for count in (0, pace._unread):
            os.write(writing, READ_COUNT.pack(count))
        pace(3)
    os.close(writing)
    os.close(reading)
    assert ends == [True]
    assert pace.cost.cpu >= 0
    assert pace.cost.wall > 0


def test_clients_that_have_gone() -> None:
    """Hold nothing up: all is measured then."""
    reading, writing = os.pipe()
    pace = Pace(3, lambda: None)
    pace.read_counts = reading
    pace(3)
    os.close(writing)
    pace(3)
    os.close(reading)
    assert pace._unread == 3


def test_visible_tokens(tokenizer: Tokenizer) -> None:
    """Each of them is a piece of text by itself."""
    found = visible_tokens(tokenizer)
    assert len(set(found)) == len(found) > 50
    assert all(tokenizer.decode([token]).strip() for token in found)
