"""The figures of ``mlxcel bench serve`` for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlxcel.bench.load import Lengths, Load
from mlxcel.bench.serve import Comparison, Server, Settings
from mlxcel.bench.summary import TIMES, Summary, Times


def heading(servers: Sequence[Server], settings: Settings) -> str:
    """Who was asked what."""
    load = settings.load
    named = " against ".join(f"{server.model or 'the model'} at {server.url}" for server in servers)
    shared = f", the first {settings.prefix} of them shared," if settings.prefix else ""
    return (
        f"{named}: {load.requests} requests to {load.endpoint}, {_arrival(load)}, prompts of "
        f"{_lengths(load.prompt)} tokens{shared} and answers of {_lengths(load.output)}, "
        f"seed {settings.seed}"
    )


def markdown(summary: Summary) -> str:
    """One server's figures."""
    lines = [
        "| good | failed | seconds | requests/s | output tok/s "
        "| prompt tokens | of them cached | output tokens |",
        "|---|---|---|---|---|---|---|---|",
        f"| {summary.good} | {sum(summary.errors.values())} | {summary.seconds:.2f} "
        f"| {summary.requests_per_second:.2f} | {summary.tokens_per_second:.1f} "
        f"| {summary.prompt_tokens} | {summary.cached_tokens} | {summary.output_tokens} |",
        "",
        "| milliseconds | mean | p50 | p95 | p99 |",
        "|---|---|---|---|---|",
        *(_times(words, getattr(summary, name)) for name, words in TIMES.items()),
    ]
    return "\n".join([*lines, *_remarks([summary])])


def comparison_markdown(comparison: Comparison) -> str:
    """Two servers' figures side by side; medians of the pairs."""
    lines = [
        "| figure | reference | ours | ratio | pairs' range |",
        "|---|---|---|---|---|",
        *(
            f"| {row.name} | {row.reference.median:.1f} {row.unit} "
            f"| {row.ours.median:.1f} {row.unit} | {row.ratio.median:.2f} "
            f"| {row.ratio.low:.2f}-{row.ratio.high:.2f} |"
            for row in comparison.rows
        ),
    ]
    for whose, summaries in zip(
        ("reference: ", "ours: "), zip(*comparison.pairs, strict=True), strict=True
    ):
        lines += _remarks(summaries, whose)
    return "\n".join(lines)


def _remarks(summaries: Sequence[Summary], whose: str = "") -> list[str]:
    """What a reader must know to believe the figures, after an empty line each."""
    remarks = []
    kinds = {kind for summary in summaries for kind in summary.errors}
    for kind in sorted(kinds):
        count = sum(summary.errors.get(kind, 0) for summary in summaries)
        remarks.append(f"failed, {kind}: {count}")
    if short := sum(summary.short for summary in summaries):
        remarks.append(f"shorter than asked for: {short} (end tokens were not ignored)")
    if estimated := sum(summary.estimated for summary in summaries):
        remarks.append(f"answers whose tokens the server did not count: {estimated}")
    return [line for remark in remarks for line in ("", whose + remark)]


def _times(words: str, times: Times | None) -> str:
    figures = ["-"] * 4
    if times is not None:
        figures = [f"{value:.1f}" for value in (times.mean, times.p50, times.p95, times.p99)]
    return f"| {words} | {' | '.join(figures)} |"


def _arrival(load: Load) -> str:
    most = f"at most {load.clients} at once" if load.clients else "as many at once as come"
    return most if math.isinf(load.rate) else f"{load.rate:g} a second, {most}"


def _lengths(lengths: Lengths) -> str:
    low, high = lengths
    return str(low) if low == high else f"{low} to {high}"
