"""The figures of a load's answers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import attrs
import numpy as np

from mlxcel.bench.answer import Answer
from mlxcel.bench.load import Run


@attrs.frozen
class Times:
    """Milliseconds: the mean, and within how many 50, 95 and 99 of a hundred were."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Times | None:
        """The figures of ``seconds``; None where there are none."""
        values = 1e3 * np.fromiter(seconds, dtype=float)
        if not values.size:
            return None
        return cls(float(values.mean()), *map(float, np.percentile(values, [50, 95, 99])))


@attrs.frozen
class Summary:
    """What a load came to; all but ``errors`` is of the answers that did not fail.

    Attributes:
        good: Answers that did not fail.
        errors: How many failed, by kind.
        short: Good answers with fewer tokens than were asked for.
        estimated: Good answers whose tokens the server did not count.
        seconds: From the first request to the last answer.
        prompt_tokens, cached_tokens, output_tokens: Of all good answers together.
        requests_per_second, tokens_per_second: Good answers, and their output tokens.
        first_token: From the request to the first text.
        between_chunks: From one chunk with text to the next; a chunk may hold several tokens.
        per_token: From the first text to the last, for each token after the first.
        whole: From the request to the answer's end.
    """

    good: int
    errors: Mapping[str, int]
    short: int
    estimated: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_second: float
    tokens_per_second: float
    first_token: Times | None
    between_chunks: Times | None
    per_token: Times | None
    whole: Times | None


def summarize(run: Run) -> Summary:
    """The figures of ``run``."""
    good = [answer for answer in run.answers if answer.error is None]
    made = sum(answer.output_tokens for answer in good)
    return Summary(
        good=len(good),
        errors=dict(Counter(a.error for a in run.answers if a.error is not None).most_common()),
        short=sum(answer.output_tokens < answer.asked for answer in good),
        estimated=sum(answer.estimated for answer in good),
        seconds=run.seconds,
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        cached_tokens=sum(answer.cached_tokens for answer in good),
        output_tokens=made,
        requests_per_second=len(good) / run.seconds,
        tokens_per_second=made / run.seconds,
        first_token=Times.of(a.times[0] - a.began for a in good if a.times),
        between_chunks=Times.of(gap for answer in good for gap in _gaps(answer)),
        per_token=Times.of(_per_token(a) for a in good if _has_gaps(a)),
        whole=Times.of(answer.ended - answer.began for answer in good),
    )


def _gaps(answer: Answer) -> Iterable[float]:
    return (later - earlier for earlier, later in itertools.pairwise(answer.times))


def _has_gaps(answer: Answer) -> bool:
    return len(answer.times) > 1 and answer.output_tokens > 1


def _per_token(answer: Answer) -> float:
    return (answer.times[-1] - answer.times[0]) / (answer.output_tokens - 1)


def _time(name: str, of_hundred: str) -> Callable[[Summary], float | None]:
    def read(summary: Summary) -> float | None:
        times: Times | None = getattr(summary, name)
        return None if times is None else float(getattr(times, of_hundred))

    return read


TIMES = {
    "first_token": "time to first token",
    "between_chunks": "between chunks of text",
    "per_token": "per output token",
    "whole": "end to end",
}
"""What a table calls the times of a summary."""

FIGURES: tuple[tuple[str, str, Callable[[Summary], float | None]], ...] = (
    ("output", "tok/s", lambda summary: summary.tokens_per_second),
    ("requests", "/s", lambda summary: summary.requests_per_second),
    *(
        (f"{words}, {of_hundred}", "ms", _time(name, of_hundred))
        for name, words in TIMES.items()
        for of_hundred in ("p50", "p95", "p99")
    ),
)
"""The figures by which two servers are compared: name, unit, and how to read it."""
