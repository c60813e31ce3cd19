"""``mlxcel bench collectives``: the sum of an array of each of several processes.

All subjects are there at once and measure each size in turn.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import attrs
import numpy as np

from mlxcel.bench.collectives_role import Role
from mlxcel.bench.in_turn import (
    Amount,
    Ratio,
    clear,
    format_size,
    measure,
    medians,
    quotient,
    ratio_table,
)
from mlxcel.bench.pairs import Spread
from mlxcel.bench.subject import Subject
from mlxcel.pipeline.grid import free_ports
from mlxcel.pipeline.group import group_peers

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
"""The arrays by default: what a decode step adds up, and what chunks of prompts do."""

RING = "ring of mx.distributed"
END = "mlxcel.bench.collectives_end"
LOOPBACK = "127.0.0.1"
AMOUNT = Amount(128 << 20, 500)


@attrs.frozen
class Settings:
    """What to measure: ``sizes`` in bytes of float32, ``spin`` in seconds."""

    transport: str
    sizes: tuple[int, ...] = SIZES
    ranks: int = 2
    pairs: int = 5
    spin: float = 0.0


@attrs.frozen
class Row:
    """One subject and size: the median of each measurement, in seconds, and 95 of all rounds."""

    size: int
    subject: str
    median: Spread
    p95: float


@attrs.frozen
class Report:
    """What a run came to."""

    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]


def run(settings: Settings) -> Report:
    """Measure all subjects."""
    with ExitStack() as stack:
        times = measure(list(_subjects(settings, stack)), settings.sizes, settings.pairs, AMOUNT)
    middle = medians(times)
    rows = [
        Row(*key, Spread.of(middle[key]), float(np.percentile(np.concatenate(runs), 95)))
        for key, runs in times.items()
    ]
    return Report(tuple(rows), tuple(_ratios(settings, middle)))


def _ratios(
    settings: Settings, middle: Mapping[tuple[int, str], Sequence[float]]
) -> Iterator[Ratio]:
    ours = settings.transport
    for size in settings.sizes:
        for other in (RING, clear(ours)):
            bound = "≤ 1.2" if size >= 1 << 20 else "≤ 2" if size == 64 << 10 else ""
            spread = quotient(middle[size, ours], middle[size, other])
            yield Ratio(size, f"{ours} / {other}, time", spread, bound if other == RING else "")


def markdown(report: Report) -> str:
    """Two tables: the times, and how they compare."""
    lines = ["| array | over | all-reduce, median | range | p95 |", "|---|---|---|---|---|"]
    for row in report.rows:
        median, low, high, p95 = (
            f"{1e6 * seconds:,.0f}"
            for seconds in (row.median.median, row.median.low, row.median.high, row.p95)
        )
        lines.append(
            f"| {format_size(row.size)} | {row.subject} | {median} µs | {low}-{high} | {p95} µs |"
        )
    return "\n".join([*lines, "", *ratio_table("array", report.ratios)])


def _subjects(settings: Settings, stack: ExitStack) -> Iterator[Subject]:
    """All groups of processes, started; ``stack`` ends them."""

    def start(subject: Subject) -> Subject:
        stack.callback(subject.close)
        return subject

    yield start(_connected(settings, sealed=True))
    yield start(_connected(settings, sealed=False))
    hosts = [f"{LOOPBACK}:{port}" for port in free_ports(settings.ranks)]
    roles = [Role(rank, settings.ranks, hosts=hosts) for rank in range(settings.ranks)]
    yield start(Subject(RING, END, roles))


def _connected(settings: Settings, *, sealed: bool) -> Subject:
    """Processes with TCP connections over the loopback interface, as the ranks of a stage."""
    ranks, name = settings.ranks, settings.transport
    ends: list[dict[str, tuple[int, Sequence[str]]]] = [{} for _ in range(ranks)]
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        for low in range(ranks):
            for high in (peer for peer in group_peers(low, ranks) if peer > low):
                keys = (os.urandom(32).hex(), os.urandom(32).hex()) if sealed else ()
                a = stack.enter_context(socket.create_connection(listener.getsockname()))
                b = stack.enter_context(listener.accept()[0])
                ends[low][str(high)] = (a.fileno(), keys)
                ends[high][str(low)] = (b.fileno(), keys[::-1])
        return Subject(
            name if sealed else clear(name),
            END,
            [Role(rank, ranks, name, ends[rank], spin=settings.spin) for rank in range(ranks)],
            [descriptor for end in ends for descriptor, _ in end.values()],
        )
