"""Drawing tokens: greedy, filtered, and from keys without a state."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxcel.pipeline.operations import Sampling
from mlxcel.stage.batch import Row
from mlxcel.stage.sampler import draw_key, sample

LOGITS = mx.random.normal((6, 40), key=mx.random.key(1)) * 2
GREEDY = mx.argmax(LOGITS, axis=-1).tolist()
DRAWS = 2000


def rows(count: int, position: int = 10, **sampling: float) -> list[Row]:
    """``count`` requests with seeds of their own at one position."""
    return [Row(i, Sampling(seed=100 + i, **sampling), position) for i in range(count)]  # type: ignore[arg-type]


def draws(logits: list[float], **sampling: float) -> np.ndarray:
    """How often each token comes in draws at ``DRAWS`` positions of one request."""
    made = []
    for first in range(0, DRAWS, 250):
        many = [Row(0, Sampling(seed=7, **sampling), first + i) for i in range(250)]  # type: ignore[arg-type]
        made += sample(mx.array([logits] * 250), many)
    return np.bincount(made, minlength=len(logits))


def assert_like(counts: np.ndarray, probabilities: list[float]) -> None:
    """Each count within five standard deviations of what its probability says."""
    for count, p in zip(counts, probabilities, strict=True):
        assert abs(count - DRAWS * p) <= 5 * math.sqrt(DRAWS * p * (1 - p)), (counts, probabilities)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_greedy_is_argmax(dtype: mx.Dtype) -> None:
    """Temperature 0 takes the largest logit of each row, in any dtype."""
    logits = LOGITS.astype(dtype)
    assert sample(logits, rows(6)) == mx.argmax(logits, axis=-1).tolist()


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.5}]
)
def test_the_narrowest_filters_are_greedy(filters: dict[str, float]) -> None:
    """A filter that leaves one token leaves the most probable one, however hot."""
    assert sample(LOGITS, rows(6, temperature=50.0, **filters)) == GREEDY


def test_a_draw_depends_on_its_key_only() -> None:
    """Alone, in any company and at any place of a batch, a request gets the same token."""
    drawing = rows(6, temperature=1.5, top_p=0.95)
    together = sample(LOGITS, drawing)
    assert together != GREEDY
    for i in range(6):
        assert sample(LOGITS[i : i + 1], drawing[i : i + 1]) == [together[i]]
    order = [4, 1, 5, 0]
    shuffled = sample(LOGITS[mx.array(order)], [drawing[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_rows_of_a_batch_sample_each_in_its_own_way() -> None:
    """A greedy row beside drawing ones stays greedy, and they draw as they do alone."""
    mixed = rows(6, temperature=1.5)
    mixed[2] = Row(2, Sampling(), 10)
    made = sample(LOGITS, mixed)
    assert made[2] == GREEDY[2]
    alone = sample(LOGITS, rows(6, temperature=1.5))
    assert [*made[:2], *made[3:]] == [*alone[:2], *alone[3:]]


def test_a_draw_is_repeatable_and_moves_on() -> None:
    """The same position draws the same again; other positions draw others."""
    first, *others = ([*sample(LOGITS, rows(6, p, temperature=2.0))] for p in (3, 3, 4, 5))
    assert others[0] == first
    assert others[1] != first
    assert others[2] not in (first, others[1])


def test_frequencies_follow_the_softmax() -> None:
    """Over many positions each token comes as often as its probability says."""
    probabilities = [0.5, 0.25, 0.15, 0.1]
    assert_like(draws([math.log(p) for p in probabilities], temperature=1.0), probabilities)


def test_temperature_divides_the_logits() -> None:
    """A temperature of 2 takes the square root of the ratios."""
    weights = [math.sqrt(p) for p in (0.5, 0.25, 0.15, 0.1)]
    logits = [math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]
    assert_like(draws(logits, temperature=2.0), [w / sum(weights) for w in weights])


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, [0.5, 0.25, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.7}, [0.5, 0.25, 0, 0]),  # the first alone does not reach 0.7
        ({"top_p": 0.8}, [0.5, 0.25, 0.15, 0]),
        ({"top_p": 1.0}, [0.5, 0.25, 0.15, 0.1]),
        ({"min_p": 0.25}, [0.5, 0.25, 0.15, 0]),  # at least a quarter of 0.5
        ({"top_p": 0.8, "top_k": 2}, [0.5, 0.25, 0, 0]),
    ],
)
def test_filters(filters: dict[str, float], kept: list[float]) -> None:
    """What a filter removes never comes; the rest keeps its proportions."""
    order = [2, 0, 3, 1]  # the most probable token is not the first one
    logits = [0.0] * 4
    for place, p in zip(order, (0.5, 0.25, 0.15, 0.1), strict=True):
        logits[place] = math.log(p)
    counts = draws(logits, temperature=1.0, **filters)[order]
    assert_like(counts, [p / sum(kept) for p in kept])


def test_filters_look_at_the_probabilities_before_the_temperature() -> None:
    """A hot temperature does not let in what the filters keep out."""
    logits = [math.log(p) for p in (0.7, 0.2, 0.06, 0.04)]
    assert draws(logits, temperature=10.0, top_p=0.8)[2:].tolist() == [0, 0]
    assert draws(logits, temperature=10.0, min_p=0.2)[2:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("sampling", "position", "key"),
    [
        (Sampling(), 0, 0x238275BC38FCBE91),
        (Sampling(seed=42, choice=1), 17, 0x9E5FC771D786B599),
        (Sampling(seed=(1 << 63) - 1), 4096, 0xEA058EEA617E9F32),
    ],
)
def test_keys_never_change(sampling: Sampling, position: int, key: int) -> None:
    """The same request draws the same on every machine and in every version."""
    assert draw_key(sampling, position) == key


def test_keys_differ() -> None:
    """Seed, choice and position each count, and are not interchangeable."""
    keys = {
        draw_key(Sampling(seed=seed, choice=choice), position)
        for seed in range(-2, 10)
        for choice in range(10)
        for position in range(10)
    }
    assert len(keys) == 12 * 10 * 10
    assert all(0 <= key < 1 << 64 for key in keys)
