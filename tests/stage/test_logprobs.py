"""Log-probabilities: the model's own, whatever a row does with its logits."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from mlxcel.pipeline.operations import Sampling
from mlxcel.pipeline.step import FAILED_ROW, Logprobs
from mlxcel.stage.batch import Row
from mlxcel.stage.logprobs import LEAST, logprobs
from mlxcel.stage.sampler import sample

LOGITS = mx.random.normal((3, 40), key=mx.random.key(1)) * 4


def row(index: int, **sampling: Any) -> Row:
    return Row(index, Sampling(**sampling), 10)


def asked(logits: mx.array, tokens: list[int], count: int) -> list[Logprobs]:
    """Of rows that all ask for ``count``."""
    found = logprobs(logits, [row(i, logprobs=count) for i in range(len(tokens))], tokens)
    assert None not in found
    return [item for item in found if item is not None]


def log_softmax(logits: mx.array) -> np.ndarray:
    """In float64, by its definition."""
    wide = np.array(logits.astype(mx.float32)).astype(np.float64)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_they_are_the_log_softmax(dtype: mx.Dtype) -> None:
    """The drawn token's and the likeliest tokens' values, in float32 from any dtype."""
    logits = LOGITS.astype(dtype)
    expected, drawn = log_softmax(logits), [3, 0, 39]
    for mine, token, item in zip(expected, drawn, asked(logits, drawn, 5), strict=True):
        assert item.drawn == pytest.approx(mine[token], abs=1e-5)
        assert item.values == pytest.approx(mine[list(item.ids)], abs=1e-5)
        assert item.values == tuple(sorted(item.values, reverse=True))
        assert set(mine[list(item.ids)]) == set(sorted(mine)[-5:])


def test_equal_values_come_by_the_smaller_id() -> None:
    """Where several tokens are as likely, also at the edge, the smaller ids are taken first."""
    logits = mx.array([[1.0, 5.0, 1.0, 5.0, 1.0, 1.0]])
    assert asked(logits, [0], 4)[0].ids == (1, 3, 0, 2)


@pytest.mark.parametrize(("count", "ids"), [(0, 0), (1, 1), (20, 20), (40, 40), (1000, 40)])
def test_as_many_as_asked_for_or_as_there_are(count: int, ids: int) -> None:
    """Zero is the drawn token's alone; no more than the vocabulary has."""
    [item, *_] = asked(LOGITS, [1, 2, 3], count)
    assert len(item.ids) == len(item.values) == ids


def test_what_a_row_does_with_its_logits_does_not_count() -> None:
    """Temperature, filters, biases and penalties change what is drawn, not these values."""
    plain = row(0, logprobs=6)
    changed = Row(
        0,
        Sampling(
            temperature=2.0,
            top_k=2,
            top_p=0.5,
            repetition_penalty=3.0,
            presence_penalty=1.0,
            bias_tokens=(3,),
            bias_values=(50.0,),
            logprobs=6,
        ),
        10,
        prompt=(1, 2),
        drawn=(3, 4),
    )
    expected = logprobs(mx.array(LOGITS.tolist()), [plain, row(1), row(2)], [3, 0, 0])
    logits = mx.array(LOGITS.tolist())
    tokens = sample(logits, [changed, row(1), row(2)])
    assert tokens[0] == 3
    assert logprobs(logits, [changed, row(1), row(2)], tokens) == expected


def test_only_rows_that_ask_and_have_a_token_get_any() -> None:
    """Rows that do not ask, and rows that failed, have None."""
    rows = [row(0), row(1, logprobs=1), row(2, logprobs=1)]
    assert [item is None for item in logprobs(LOGITS, rows, [1, 2, FAILED_ROW])] == [
        True,
        False,
        True,
    ]


def test_nothing_is_computed_where_nobody_asks() -> None:
    """Without a row that asks the logits are not even looked at."""
    assert logprobs(cast(mx.array, object()), [row(0), row(1)], [1, 2]) == ()


def test_what_json_cannot_hold_has_a_stand_in() -> None:
    """A token of probability zero has the least value, as every smaller one."""
    [item] = asked(mx.array([[0.0, -mx.inf, -1e30]]), [1], 3)
    assert item == Logprobs(LEAST, (0, 1, 2), (0.0, LEAST, LEAST))
