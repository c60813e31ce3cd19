"""From prompts to the steps of a slot."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mlxcel.engine.slot import (
    Request,
    Start,
    Work,
    credits_for,
    micro_batch_size,
    micro_batches,
    prompt_work,
    token_tensor,
)
from mlxcel.errors import UsageError
from mlxcel.family import Batching
from mlxcel.pipeline.operations import Finalize, Merge, New, Prepare, Sampling, Trim

SAMPLING = Sampling(temperature=0.5, seed=3)


def work(*prompts: tuple[int, ...], chunk: int = 512) -> list[Work]:
    requests = [Request(10 + i, prompt, 5, SAMPLING) for i, prompt in enumerate(prompts)]
    return prompt_work(0, requests, chunk, itertools.count(1))


def test_one_prompt() -> None:
    """The prompt without its last token, then the last token as a step that samples."""
    assert work((1, 2, 3)) == [
        Work((New(0, 10, SAMPLING),), [[1, 2]], sample=False),
        Work((), [[3]], sample=True),
    ]


def test_one_token() -> None:
    """A prompt of one token is one step."""
    assert work((7,)) == [Work((New(0, 10, SAMPLING),), [[7]], sample=True)]


def test_a_grammar_travels_with_the_new_row() -> None:
    """It is sent once, with the tokens that end its text; rows without one get neither."""
    requests = [Request(10, (1,), 5, SAMPLING, grammar="g"), Request(11, (2,), 5, SAMPLING)]
    [only] = prompt_work(0, requests, 512, itertools.count(1), ends=(7, 8))
    assert only.operations == (
        New(1, 10, SAMPLING, grammar="g", ends=(7, 8)),
        New(2, 11, SAMPLING),
        Merge(0, (1, 2)),
    )
    start = Start(source=5, trim=2, cached=1)
    [*_, last] = prompt_work(0, requests[:1], 512, itertools.count(1), start, (7,))
    assert last.operations == (
        New(0, 10, SAMPLING, source=5, grammar="g", ends=(7,)),
        Trim(0, 2),
    )


@pytest.mark.parametrize(
    ("length", "chunk", "columns"),
    [(17, 8, [8, 8, 1]), (18, 8, [8, 8, 1, 1]), (9, 8, [8, 1]), (8, 8, [7, 1]), (4, 1, [1] * 4)],
)
def test_chunks(length: int, chunk: int, columns: list[int]) -> None:
    """No step carries more than a chunk; operations go with the first, sampling with the last."""
    steps = work(tuple(range(length)), chunk=chunk)
    assert [len(step.tokens[0]) for step in steps] == columns
    assert [token for step in steps for token in step.tokens[0]] == list(range(length))
    assert [bool(step.operations) for step in steps] == [True] + [False] * (len(steps) - 1)
    assert [step.sample for step in steps] == [False] * (len(steps) - 1) + [True]


def test_equal_prompts_need_no_padding() -> None:
    """Rows of one length are made singly and merged, nothing else."""
    first, last = work((1, 2), (3, 4))
    assert first.operations == (New(1, 10, SAMPLING), New(2, 11, SAMPLING), Merge(0, (1, 2)))
    assert first.tokens == [[1], [3]]
    assert last == Work((), [[2], [4]], sample=True)


def test_ragged_prompts_are_padded_on_the_right() -> None:
    """Each row's real tokens are announced, and the padding ends before the last tokens."""
    first, second, last = work((1, 2, 3, 4, 8), (5,), (6, 7), chunk=2)
    assert first.operations[-1] == Prepare(0, (4, 0, 1), (0, 4, 3))
    assert first.tokens == [[1, 2], [0, 0], [6, 0]]
    assert second == Work((), [[3, 4], [0, 0], [0, 0]], sample=False)
    assert last == Work((Finalize(0),), [[8], [5], [7]], sample=True)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 512])
@pytest.mark.parametrize("longest", range(1, 9))
def test_a_padded_step_has_more_than_one_column(longest: int, chunk: int) -> None:
    """A rotating cache takes one column for decoding: amid padding there is never just one."""
    *chunks, _ = work(tuple(range(longest + 1)), (1,), chunk=chunk)
    widths = [len(step.tokens[0]) for step in chunks]
    assert all(width > 1 for width in widths)
    assert all(width <= max(chunk, 2) for width in widths)
    [prepare] = [op for op in chunks[0].operations if isinstance(op, Prepare)]
    assert prepare.lengths == (longest, 0)
    assert prepare.right_padding == (sum(widths) - longest, sum(widths))


def test_token_tensor() -> None:
    """Token ids travel as little-endian int32 of [rows, length]."""
    tensor = token_tensor([[1, 2, 3], [4, 5, 200_000]])
    assert (tensor.dtype, tensor.shape) == ("int32", (2, 3))
    assert np.frombuffer(tensor.data, "<i4").tolist() == [1, 2, 3, 4, 5, 200_000]


@pytest.mark.parametrize(
    ("prompts", "stages", "asked", "rows"),
    [(1, 3, None, 1), (7, 3, None, 3), (8, 1, None, 8), (8, 3, 2, 2), (2, 3, 16, 16)],
)
def test_micro_batch_size(prompts: int, stages: int, asked: int | None, rows: int) -> None:
    """What was asked for; by itself as many slots as stages."""
    assert micro_batch_size(prompts, stages, asked) == rows


@pytest.mark.parametrize("asked", [0, -1])
def test_no_rows_are_refused(asked: int) -> None:
    """A slot without a sequence is a usage error that names the flag."""
    with pytest.raises(UsageError, match=f"--pp-micro-batch-size {asked} "):
        micro_batch_size(4, 2, asked)


@pytest.mark.parametrize(
    ("prompts", "stages", "rows"), [(1, 1, 1), (1, 3, 1), (9, 3, 1), (9, 2, 4)]
)
def test_credits(prompts: int, stages: int, rows: int) -> None:
    """Every slot can have a step in flight, and one long prompt can fill all stages."""
    credits = credits_for(prompts, stages, rows)
    assert credits * rows >= prompts
    assert credits >= stages


@pytest.mark.parametrize(
    ("batching", "groups"),
    [
        (Batching.PADDED, [[0, 1, 2], [3, 4]]),
        (Batching.EQUAL, [[0, 1], [2], [3, 4]]),
        (Batching.SINGLE, [[0], [1], [2], [3], [4]]),
    ],
)
def test_who_shares_a_slot(batching: Batching, groups: list[list[int]]) -> None:
    """Requests keep their order, and a slot has only rows that its model can run together."""
    requests = [Request(i, (1,) * length, 5) for i, length in enumerate((4, 4, 2, 7, 7))]
    found = micro_batches(requests, 3, batching)
    assert [[request.index for request in group] for group in found] == groups
