"""``mlxcel bench engine``: what scheduling costs a step, with stages that cost nothing."""

from __future__ import annotations

import time
from pathlib import Path

import attrs

from mlxcel.bench.null_pipeline import NullPipeline
from mlxcel.bench.pairs import Spread
from mlxcel.bench.streaming import step_cost
from mlxcel.checkpoint.config import read_config
from mlxcel.engine.engine import Engine, Settings
from mlxcel.engine.limits import Limits, credits_for
from mlxcel.engine.sequence import Output
from mlxcel.engine.slot import Request
from mlxcel.engine.tokenizer import Tokenizer, load_tokenizer

STAGES = 2
SEQUENCES = 64


@attrs.frozen
class Row:
    """One figure: milliseconds a step, or a ratio."""

    name: str
    spread: Spread
    unit: str
    bound: str


def run(folder: Path | None, repeats: int = 5) -> list[Row]:
    """All figures; those with text need the tokenizer of a checkpoint."""
    step = f"a step of {SEQUENCES} sequences, {STAGES} null stages"
    rows = [
        Row(
            f"{step}, token ids only",
            Spread.of(_milliseconds_a_step(None) for _ in range(repeats)),
            "ms",
            "≤ 0.3",
        )
    ]
    if folder is not None:
        tokenizer = load_tokenizer(folder, read_config(folder))
        texts = Spread.of(_milliseconds_a_step(tokenizer) for _ in range(repeats))
        costs = [step_cost(tokenizer, STAGES, SEQUENCES) for _ in range(repeats)]
        cpu, wall = Spread.of(c.cpu for c in costs), Spread.of(c.wall for c in costs)
        rows += [
            Row("the same, with text", texts, "ms", ""),
            Row("the same, with text and SSE: CPU time of the server", cpu, "ms", "≤ 1"),
            Row("the same, by the clock, until the clients have read it", wall, "ms", ""),
        ]
    rows.append(
        Row(
            "10,000 queued requests against 1,000, time a request",
            Spread.of(
                (_seconds(10_000) / 10_000) / (_seconds(1_000) / 1_000) for _ in range(repeats)
            ),
            "x",
            "about 1",
        )
    )
    return rows


def markdown(rows: list[Row]) -> str:
    """The rows as a table."""
    lines = ["| what | median | range | bound |", "|---|---|---|---|"]
    lines += [
        f"| {row.name} | {row.spread.median:.3f} {row.unit} "
        f"| {row.spread.low:.3f}-{row.spread.high:.3f} | {row.bound} |"
        for row in rows
    ]
    return "\n".join(lines)


def _milliseconds_a_step(tokenizer: Tokenizer | None) -> float:
    """Rounds of a full engine, divided by the steps that it sent."""
    pipeline, engine = _engine(tokenizer, parallel=SEQUENCES)
    for index in range(SEQUENCES):
        engine.submit(Request(index, (1, 2, 3), 400, ignore_end=True))
    while engine.active < SEQUENCES:
        engine.round()
    began, steps = time.perf_counter(), pipeline.steps
    while engine.active == SEQUENCES:
        engine.round()
    return 1e3 * (time.perf_counter() - began) / (pipeline.steps - steps)


def _seconds(requests: int) -> float:
    """From the first to the last of ``requests`` requests of one token."""
    _, engine = _engine(None, parallel=32)
    for index in range(requests):
        engine.submit(Request(index, (1, 2, 3), 1, ignore_end=True))
    began = time.perf_counter()
    while engine.waiting or engine.active:
        engine.round()
    return time.perf_counter() - began


def _engine(tokenizer: Tokenizer | None, *, parallel: int) -> tuple[NullPipeline, Engine]:
    # All rows in one slot, so that a step has all of them.
    limits = Limits(parallel=parallel, batch=parallel, micro_batch=parallel)
    pipeline = NullPipeline(STAGES, credits_for(STAGES, limits), range(200))

    def deliver(outputs: list[Output]) -> None:
        """Nobody listens."""

    settings = Settings(limits, queue_depth=1_000_000)
    return pipeline, Engine(pipeline, [], tokenizer, settings, deliver)
