"""A server in processes of its own under a thousand requests of every kind; what seeds promise."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import attrs
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfds"),
]

MLXCEL = Path(sys.executable).with_name("mlxcel")
CLIENTS = 32
WARM, REQUESTS, BETWEEN = 300, 1000, 100
GROWTH = 20 << 20
"""Bytes that a process may grow between request WARM and the last ones.

What it holds goes up and down by as much, with the batches that happened to meet. So it is read
thrice, BETWEEN requests apart; what is lost for good is in the lowest of them too.
"""

SECONDS = 120.0
LISTENING = "listening on "
HELD = ("mlxcel_active_sequences", "mlxcel_queue_depth", "mlxcel_kv_reserved_bytes")
"""Gauges of what requests hold; with a prefix cache, bytes stay reserved for what it knows."""


@contextmanager
def server(
    folder: Path, log: Path, *flags: str
) -> Iterator[tuple[subprocess.Popen[bytes], str, list[int]]]:
    """A ready server of two worker processes, its URL and the workers' ids; stderr is ``log``."""
    command = [MLXCEL, "serve", "-m", folder, "--port", "0", "--pp-size", "2", "--metrics", *flags]
    with log.open("wb") as stderr:
        process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        until = time.monotonic() + SECONDS
        while LISTENING not in log.read_text():
            assert process.poll() is None and time.monotonic() < until, log.read_text()
        url = log.read_text().partition(LISTENING)[2].split()[0]
        asyncio.run(ready(url))
        children = Path(f"/proc/{process.pid}/task").glob("*/children")
        yield process, url, [int(pid) for path in children for pid in path.read_text().split()]
    finally:
        process.kill()
        process.wait()


async def ready(url: str) -> None:
    """Return when the server takes requests."""
    async with aiohttp.ClientSession(url) as session, asyncio.timeout(SECONDS):
        while True:
            async with session.get("/health") as response:
                if response.status == 200:
                    return


@attrs.define
class Tally:
    """What became of the requests."""

    outcomes: Counter[str] = attrs.field(factory=Counter)
    faults: list[str] = attrs.field(factory=list)


def a_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body that the server must take."""
    text = "".join(draw.choices("abc déf 日本😀.", k=draw.choice([1, 3, 10, 40, 120])))
    body: dict[str, Any] = {"max_tokens": draw.choice([1, 2, 8, 30, 80])}
    if draw.random() < 0.6:
        body |= {"temperature": draw.choice([0.5, 1.0, 2.0]), "seed": draw.getrandbits(40)}
    if draw.random() < 0.4:
        body["stop"] = draw.choices(["a", "e", "zz", "\n", "本"], k=draw.randint(1, 4))
    if draw.random() < 0.5:
        body["stream"] = True
        if draw.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    if draw.random() < 0.5:
        return "/v1/completions", {**body, "prompt": text}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}


async def ask(session: aiohttp.ClientSession, draw: random.Random, tally: Tally) -> None:
    """Send one request and read its answer, or leave at some moment before its end."""
    path, body = a_request(draw)
    leave_after = draw.random() * 0.3 if draw.random() < 0.3 else None
    try:
        async with asyncio.timeout(leave_after), session.post(path, json=body) as response:
            data = await response.read()
    except TimeoutError:
        assert leave_after is not None
        tally.outcomes["left"] += 1
        return
    tally.outcomes["streamed" if "stream" in body else "whole"] += 1
    fault = fault_of(response.status, data, body)
    if fault is not None:
        tally.faults.append(f"{fault}: {body} {data[-300:]!r}")


def fault_of(status: int, data: bytes, body: dict[str, Any]) -> str | None:
    """What is wrong with a whole answer, if anything."""
    if status != 200:
        return f"status {status}"
    if "stream" not in body:
        [choice] = json.loads(data)["choices"]
        return None if choice["finish_reason"] in ("stop", "length") else "no finish reason"
    *events, end = data.decode().split("\n\n")
    chunks = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
    if end or not chunks or chunks.pop() != "[DONE]":
        return "no [DONE] at the end"
    objects = [json.loads(chunk) for chunk in chunks]
    reasons = [choice["finish_reason"] for part in objects for choice in part["choices"]]
    if len([reason for reason in reasons if reason is not None]) != 1 or reasons[-1] is None:
        return f"finish reasons {reasons}"
    if ("stream_options" in body) != ("usage" in objects[-1]):
        return "usage"
    return None


async def load(url: str, count: int, draw: random.Random) -> Tally:
    """``count`` requests from up to CLIENTS clients at once."""
    tally, numbers = Tally(), iter(range(count))

    async def client(seed: int) -> None:
        own = random.Random(seed)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(url, timeout=timeout) as session:
            for _ in numbers:
                await ask(session, own, tally)

    async with asyncio.timeout(5 * SECONDS):
        await asyncio.gather(*(client(draw.getrandbits(32)) for _ in range(CLIENTS)))
    return tally


async def gauges_at_rest(url: str) -> dict[str, float]:
    """The gauges of what requests hold, as soon as all are zero or after a while."""
    async with aiohttp.ClientSession(url) as session:
        until = time.monotonic() + 10
        while True:
            async with session.get("/metrics") as response:
                lines = (await response.text()).splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if line.startswith(HELD))
            found = {name: float(value) for name, value in values.items()}
            if not any(found.values()) or time.monotonic() > until:
                return found


def resident(pids: Sequence[int]) -> list[int]:
    """Bytes of memory that each process holds."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    found = [re.search(r"VmRSS:\s+(\d+) kB", text) for text in texts]
    return [int(match[1]) << 10 for match in found if match is not None]


def has_ended(pid: int) -> bool:
    """Whether a process that need not be our child ends in a few seconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 5.0)[0])
    finally:
        os.close(fd)


@pytest.mark.parametrize("remembered", ["0", "16"])
def test_a_thousand_requests(tiny: Callable[..., Path], tmp_path: Path, remembered: str) -> None:
    """Every stream ends once, nothing stays reserved, memory is flat, and the end is clean."""
    log, draw = tmp_path / "stderr", random.Random(20)
    with server(tiny("llama"), log, "--prefix-cache", remembered) as (process, url, workers):
        assert len(workers) == 2
        first = asyncio.run(load(url, WARM, draw))
        before = resident([process.pid, *workers])
        tallies, readings = [first], []
        for count in (REQUESTS - WARM - 2 * BETWEEN, BETWEEN, BETWEEN):
            tallies.append(asyncio.run(load(url, count, draw)))
            readings.append(resident([process.pid, *workers]))
        gauges = asyncio.run(gauges_at_rest(url))
        process.send_signal(signal.SIGTERM)
        code = process.wait(SECONDS)
        assert all(has_ended(pid) for pid in workers)
    outcomes = sum((tally.outcomes for tally in tallies), Counter())
    assert [fault for tally in tallies for fault in tally.faults] == []
    assert outcomes.total() == REQUESTS
    assert min(outcomes[kind] for kind in ("left", "streamed", "whole")) > 50, outcomes
    held = {name for name, value in gauges.items() if value}
    assert len(gauges) == 4
    assert not held or (remembered != "0" and all("reserved" in name for name in held)), gauges
    lowest = [min(each) for each in zip(*readings, strict=True)]
    grown = [now - then for then, now in zip(before, lowest, strict=True)]
    assert max(grown) < GROWTH, (before, readings)
    assert code == 0
    assert "Traceback" not in log.read_text()
    assert log.read_text().splitlines()[-1].startswith(LISTENING)


def test_a_seed_means_the_same_everywhere(tiny: Callable[..., Path]) -> None:
    """One seed draws the same tokens on 1, 2 and 3 stages, in threads and in processes."""
    path = tiny("llama", quantize="4:32")
    flags = "-n 24 --temp 0.8 --seed 7 --dtype float32 --weights quantized --blas wheel --json"
    drawn = {}
    for size in "123":
        for workers in ("thread", "process"):
            command = [
                MLXCEL,
                "generate",
                "-m",
                path,
                "-p",
                "Hello",
                "-p",
                "Seeds, 日本",
                "--pp-size",
            ]
            command += [size, "--pp-workers", workers, *flags.split(), "--no-chat-template"]
            done = subprocess.run([*map(str, command)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            one, two, _ = map(json.loads, done.stdout.splitlines())
            drawn[size, workers] = (one["tokens"], two["tokens"])
    assert len(drawn) == 6
    assert len(set(map(str, drawn.values()))) == 1, drawn
    assert len(drawn["1", "thread"][0]) > 3
