"""``mlxcel bench server``: clients side by side, on ``mlxcel serve`` and on mlx-lm's server."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import attrs

from mlxcel.bench.pairs import Spread
from mlxcel.checkpoint.config import read_config
from mlxcel.errors import DeadlineError

START_SECONDS = 120.0
RUN_SECONDS = 600.0


@attrs.frozen
class Settings:
    """``clients`` send one request each, at once, for ``tokens`` tokens; ``pairs`` times."""

    clients: int = 8
    tokens: int = 16
    pairs: int = 5


@attrs.frozen
class Load:
    """One run: tokens per second over all clients, and the times to their first tokens."""

    tokens_per_second: float
    first_tokens: tuple[float, ...]

    @property
    def p95(self) -> float:
        """Seconds within which 95 % of the clients had their first token."""
        ranked = sorted(self.first_tokens)
        return ranked[min(len(ranked) - 1, math.ceil(0.95 * len(ranked)) - 1)]


@attrs.frozen
class Row:
    """One regime: both servers' speeds, the pairs' ratio, both p95 times to the first token."""

    name: str
    reference: Spread
    ours: Spread
    ratio: Spread
    reference_p95: float
    our_p95: float


REGIMES = {
    "wheel BLAS, weights as stored": ("--blas", "wheel", "--weights", "quantized"),
    "OpenBLAS where found, weights as chosen": ("--blas", "auto", "--weights", "auto"),
}
"""How ``mlxcel serve`` runs; mlx-lm's server always runs as its users run it."""


def run(folder: Path, settings: Settings) -> Iterator[Row]:
    """Both servers stay up and at rest while the other one works."""
    for name, flags in REGIMES.items():
        with ExitStack() as stack:
            theirs = stack.enter_context(_server(_mlx_lm(folder)))
            ours = stack.enter_context(_server(_mlxcel(folder, flags)))
            pairs = []
            for run_number in range(settings.pairs + 1):
                pair = [
                    asyncio.run(_load(url, folder, settings, run_number)) for url in (theirs, ours)
                ]
                if run_number:  # the first run warms both up
                    pairs.append(pair)
        yield Row(
            name,
            Spread.of(a.tokens_per_second for a, _ in pairs),
            Spread.of(b.tokens_per_second for _, b in pairs),
            Spread.of(b.tokens_per_second / a.tokens_per_second for a, b in pairs),
            Spread.of(a.p95 for a, _ in pairs).median,
            Spread.of(b.p95 for _, b in pairs).median,
        )


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table; medians."""
    lines = [
        "| regime | mlx_lm.server tok/s | mlxcel serve tok/s | ratio | pairs' range "
        "| p95 first token, mlx_lm.server | mlxcel serve |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.reference.median:.1f} | {row.ours.median:.1f} "
        f"| {row.ratio.median:.2f} | {row.ratio.low:.2f}-{row.ratio.high:.2f} "
        f"| {row.reference_p95:.1f} s | {row.our_p95:.1f} s |"
        for row in rows
    ]
    return "\n".join(lines)


async def _load(url: str, folder: Path, settings: Settings, run_number: int) -> Load:
    """All clients at once; every run has its own prompts, so that no cache helps."""
    timeout = aiohttp.ClientTimeout(total=RUN_SECONDS)
    ends = read_config(folder).eos_token_ids
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        began = time.perf_counter()
        firsts = await asyncio.gather(
            *(
                _request(session, folder, settings.tokens, ends, f"{run_number} {client}")
                for client in range(settings.clients)
            )
        )
        seconds = time.perf_counter() - began
    return Load(settings.clients * settings.tokens / seconds, tuple(firsts))


async def _request(
    session: aiohttp.ClientSession, folder: Path, tokens: int, ends: Sequence[int], mark: str
) -> float:
    """One streamed completion of exactly ``tokens`` tokens; returns when its first one came."""
    body = {
        "model": str(folder),
        "prompt": f"{mark}: A list of animals that live in the sea, with a remark about each:",
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        # Without end tokens every answer has the same length.
        "logit_bias": {str(end): -100 for end in ends},
    }
    began, first = time.perf_counter(), math.inf
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line.removeprefix(b"data: ")).get("choices")
            if choices and choices[0].get("text"):
                first = min(first, time.perf_counter() - began)
    return first


def _mlx_lm(folder: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "mlx_lm", "server", "--model", str(folder)]


def _mlxcel(folder: Path, flags: Sequence[str]) -> list[str]:
    stages = ["--pp-size", "2", "--pp-balance", "time"]
    return [sys.executable, "-P", "-m", "mlxcel", "serve", "-m", str(folder), *stages, *flags]


@contextmanager
def _server(command: Sequence[str]) -> Iterator[str]:
    """A server on a free port, ready to answer; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(_ready(url, process))
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession(url) as session:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                async with session.get("/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise DeadlineError(
        url, "the server to be ready", START_SECONDS, "Start it by hand to see why."
    )
