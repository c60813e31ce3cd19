"""Figures from the times of answers."""

from __future__ import annotations

import pytest

from mlxcel.bench.answer import Answer
from mlxcel.bench.load import Load, Run
from mlxcel.bench.serve import Comparison, Server, Settings, rows
from mlxcel.bench.serve_table import comparison_markdown, heading, markdown
from mlxcel.bench.summary import Summary, Times, summarize

GOOD = Answer(1.0, (1.5, 1.7, 2.0), 2.5, asked=6, prompt_tokens=10, output_tokens=6)
OTHER = Answer(1.0, (1.5,), 1.5, asked=8, cached_tokens=4, output_tokens=1, estimated=True)
LOST = Answer(1.0, (1.5,), 9.0, asked=8, error="broken answer")


def summary(*answers: Answer, seconds: float = 2.0) -> Summary:
    return summarize(Run(answers, seconds))


def test_one_answer() -> None:
    """First token, gaps, time for each further token, whole: in milliseconds."""
    made = summary(GOOD)
    assert made.first_token is not None and made.between_chunks is not None
    assert made.per_token is not None and made.whole is not None
    assert made.first_token.p50 == pytest.approx(500)
    assert made.between_chunks.mean == pytest.approx(250)
    assert made.per_token.p99 == pytest.approx(500 / 5)
    assert made.whole.p95 == pytest.approx(1500)
    assert (made.tokens_per_second, made.requests_per_second) == (3.0, 0.5)


def test_sums_and_failures() -> None:
    """Tokens of good answers only; failures by kind; short and estimated ones are counted."""
    made = summary(GOOD, OTHER, LOST, LOST)
    assert (made.good, made.errors) == (2, {"broken answer": 2})
    assert (made.short, made.estimated) == (1, 1)
    assert (made.prompt_tokens, made.cached_tokens, made.output_tokens) == (10, 4, 7)
    assert made.whole is not None
    assert made.whole.mean == pytest.approx(1000)


def test_nothing_was_answered() -> None:
    """No times, no rates, and still a table."""
    made = summary(LOST)
    assert (made.first_token, made.whole, made.tokens_per_second) == (None, None, 0.0)
    table = markdown(made)
    assert "| end to end | - | - | - | - |" in table
    assert table.endswith("\n\nfailed, broken answer: 1")


def test_percentiles() -> None:
    """Of 1 to 101 milliseconds, the middle one and those near the end."""
    times = Times.of(n / 1000 for n in range(1, 102))
    assert times == Times(*(pytest.approx(value) for value in (51, 51, 96, 100)))
    assert Times.of([]) is None


def test_the_table() -> None:
    """Every figure stands under its name, remarks below."""
    table = markdown(summary(GOOD, OTHER))
    assert "| 2 | 0 | 2.00 | 1.00 | 3.5 | 10 | 4 | 7 |" in table
    assert "| time to first token | 500.0 | 500.0 | 500.0 | 500.0 |" in table
    assert "shorter than asked for: 1" in table
    assert "answers whose tokens the server did not count: 1" in table


def test_two_servers() -> None:
    """Ratios are of neighbours, ours over the reference's; what one lacks has no row."""
    pairs = [(summary(GOOD), summary(GOOD, seconds=1.0)), (summary(GOOD), summary(GOOD))]
    made = {row.name: row for row in rows(pairs)}
    assert made["output"].ratio.high == 2.0 and made["output"].ratio.low == 1.0
    assert made["time to first token, p95"].ratio.median == 1.0
    lost = rows([(summary(GOOD), summary(LOST))])
    assert lost == ()
    table = comparison_markdown(Comparison(rows(pairs), tuple(pairs)))
    assert "| output | 3.0 tok/s | 4.5 tok/s | 1.50 | 1.00-2.00 |" in table


def test_remarks_say_whose() -> None:
    """A failure in a comparison names the side."""
    pairs = ((summary(GOOD), summary(LOST)),)
    assert comparison_markdown(Comparison((), pairs)).endswith("ours: failed, broken answer: 1")


def test_the_heading() -> None:
    """Who was asked what, in one line, without the key."""
    settings = Settings(Load(rate=2.5, clients=None, prompt=(1, 9)), seed=5, prefix=3)
    text = heading([Server("http://a/v1", "m", "s3cret"), Server("http://b/v1")], settings)
    assert text == (
        "m at http://a/v1 against the model at http://b/v1: 32 requests to completions, 2.5 a "
        "second, as many at once as come, prompts of 1 to 9 tokens, the first 3 of them shared, "
        "and answers of 16, seed 5"
    )
