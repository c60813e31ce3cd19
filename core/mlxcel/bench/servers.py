"""Servers that a bench starts itself, each in a process of its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import aiohttp

from mlxcel.errors import DeadlineError, ServerUnreachable

START_SECONDS = 120.0
LOOK_SECONDS = 0.2


def mlx_lm(folder: Path) -> list[str]:
    """The command of mlx-lm's server as its users run it."""
    return [sys.executable, "-P", "-m", "mlx_lm", "server", "--model", str(folder)]


def mlxcel(folder: Path, flags: Sequence[str]) -> list[str]:
    """The command of ``mlxcel serve`` with further ``flags``."""
    return [sys.executable, "-P", "-m", "mlxcel", "serve", "-m", str(folder), *flags]


@contextmanager
def started(command: Sequence[str]) -> Iterator[str]:
    """A server on a free port of this machine, ready to answer; its URL.

    Raises:
        ServerUnreachable: It ended at once; the last line that it wrote is in the error.
        DeadlineError: It was not ready in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        url = f"http://127.0.0.1:{port}"
        try:
            asyncio.run(_ready(url, process, log))
            yield url
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _ready(url: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    timeout = aiohttp.ClientTimeout(total=START_SECONDS)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerUnreachable(url, f"it ended at once ({_last_line(log)})")
            try:
                async with session.get("/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # it does not listen yet
            await asyncio.sleep(LOOK_SECONDS)
    way_out = f"Start it by hand to see why. It wrote: {_last_line(log)}"
    raise DeadlineError(url, "the server to be ready", START_SECONDS, way_out)


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"
