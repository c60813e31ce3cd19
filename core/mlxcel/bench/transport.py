"""``mlxcel bench transport``: round trips of MLX arrays between two processes.

Each subject is a pair of processes on this machine; all of them measure each payload in turn.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory

import attrs
import numpy as np

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
from mlxcel.bench.transport_role import Role

SIZES = {
    1 << 10: "RPC hand-off",
    8 << 10: "decode-step activation",
    1 << 20: "prefill activation",
    16 << 20: "worst-case hand-off",
}
"""The payloads by default, and what they stand for."""

RING = "ring"
RAW = "raw sockets"
END = "mlxcel.bench.transport_end"
AMOUNT = Amount(64 << 20, 1000)


@attrs.frozen
class Settings:
    """What to measure: ``transports`` by name, ``sizes`` in bytes, ``spin`` in seconds."""

    transports: tuple[str, ...]
    sizes: tuple[int, ...] = tuple(SIZES)
    repeats: int = 5
    spin: float = 0.0


@attrs.frozen
class Row:
    """One subject and payload; times are round trips in seconds."""

    size: int
    subject: str
    p50: float
    p95: float
    p99: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second in one direction, from the median."""
        return self.size / (self.p50 / 2)


@attrs.frozen
class Report:
    """What a run came to."""

    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]


def run(settings: Settings) -> Report:
    """Measure all subjects."""
    with ExitStack() as stack:
        times = measure(list(_subjects(settings, stack)), settings.sizes, settings.repeats, AMOUNT)
    rows = [
        Row(size, name, *np.percentile(np.concatenate(runs), [50, 95, 99]).tolist())
        for (size, name), runs in times.items()
    ]
    return Report(tuple(rows), tuple(_ratios(settings, medians(times))))


def _ratios(
    settings: Settings, middle: Mapping[tuple[int, str], Sequence[float]]
) -> Iterator[Ratio]:
    def ratio(size: int, ours: str, other: str, bandwidth: bool) -> Spread:
        over, under = (other, ours) if bandwidth else (ours, other)
        return quotient(middle[size, over], middle[size, under])

    for size in settings.sizes:
        for name in settings.transports:
            if size < 1 << 20:
                bound = "≤ 1.0" if size <= 8 << 10 else "≤ 2" if size <= 64 << 10 else ""
                spread = ratio(size, name, RING, bandwidth=False)
                yield Ratio(size, f"{name} / {RING}, round trip", spread, bound)
                continue
            spread = ratio(size, name, clear(name), bandwidth=True)
            yield Ratio(size, f"{name} / {clear(name)}, bandwidth", spread, "≥ 0.8")
            bound = "≥ 0.4" if size >= 16 << 20 else "≥ 0.3" if size == 1 << 20 else ""
            spread = ratio(size, name, RING, bandwidth=True)
            yield Ratio(size, f"{name} / {RING}, bandwidth", spread, bound)


def markdown(report: Report) -> str:
    """Two tables: the times, and how they compare."""
    lines = [
        "| payload | over | round trip p50 | p95 | p99 | one way (half) | bandwidth |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report.rows:
        purpose = f" ({SIZES[row.size]})" if row.size in SIZES else ""
        times = (row.p50, row.p95, row.p99, row.p50 / 2)
        shown = " | ".join(f"{1e6 * seconds:,.0f} µs" for seconds in times)
        lines.append(
            f"| {format_size(row.size)}{purpose} | {row.subject} | {shown} "
            f"| {row.bandwidth / 1e9:.3f} GB/s |"
        )
    return "\n".join([*lines, "", *ratio_table("payload", report.ratios)])


def _subjects(settings: Settings, stack: ExitStack) -> Iterator[Subject]:
    """All pairs of processes, started; ``stack`` ends them."""

    def start(subject: Subject) -> Subject:
        stack.callback(subject.close)
        return subject

    for name in settings.transports:
        yield start(_connected(name, name, settings.spin, sealed=True))
        yield start(_connected(clear(name), name, settings.spin, sealed=False))
    yield start(_connected(RAW, RAW, 0.0, sealed=False))
    with _ring_environments() as environments:
        roles = (Role(RING, drives=True), Role(RING, drives=False))
        yield start(Subject(RING, END, roles, environments=environments))


def _connected(name: str, kind: str, spin: float, *, sealed: bool) -> Subject:
    """Two processes with a TCP connection over the loopback interface."""
    keys = (os.urandom(32).hex(), os.urandom(32).hex())
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as a,
        listener.accept()[0] as b,
    ):
        roles = (
            Role(kind, True, a.fileno(), keys if sealed else None, spin),
            Role(kind, False, b.fileno(), keys[::-1] if sealed else None, spin),
        )
        return Subject(name, END, roles, (a.fileno(), b.fileno()))


@contextmanager
def _ring_environments() -> Iterator[list[dict[str, str]]]:
    """What tells each of two ranks where the other is, as ``mlx.launch`` does it."""
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        hosts = [[f"127.0.0.1:{sock.getsockname()[1]}"] for sock in (a, b)]
    with TemporaryDirectory() as folder:
        file = os.path.join(folder, "hosts.json")
        with open(file, "w", encoding="utf-8") as opened:
            json.dump(hosts, opened)
        yield [{"MLX_RANK": str(rank), "MLX_HOSTFILE": file} for rank in (0, 1)]
