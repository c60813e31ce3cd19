"""Processes that are killed from outside while ``mlxcel generate`` runs in real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfds")

MLXCEL = Path(sys.executable).with_name("mlxcel")
SECONDS = 2.0


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C reaches the commands even where the tests run in the background, deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def generating(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A long run over two worker processes, past loading, and the workers' ids."""
    command = [MLXCEL, "generate", "-m", folder, "-p", "hello", "-n", "1000000", "--verbose"]
    process = subprocess.Popen(
        [*map(str, command), "--no-chat-template", "--pp-size", "2", "--pp-workers", "process"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("stage 1 device"):  # the last line of the report after loading
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield process, [int(pid) for pid in children]
    finally:
        process.kill()
        process.communicate()


def ends(pid: int, seconds: float) -> bool:
    """Whether the process ends within ``seconds``; it need not be our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_worker_ends_the_command(tiny: Callable[..., Path], stage: int) -> None:
    """Kill -9 of a worker: the command says which stage and why, exits 1, leaves nobody behind."""
    with generating(tiny("llama")) as (process, workers):
        assert len(workers) == 2
        os.kill(workers[stage], signal.SIGKILL)
        _, stderr = process.communicate(timeout=SECONDS)
        assert process.returncode == 1
        expected = f"stage {stage} (process {workers[stage]}) died: killed by SIGKILL"
        assert expected in stderr.splitlines()[-1]
        assert all(ends(pid, SECONDS) for pid in workers)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_command(tiny: Callable[..., Path], number: int) -> None:
    """When the command is killed, its workers end by themselves."""
    with generating(tiny("llama")) as (process, workers):
        process.send_signal(number)
        process.wait(SECONDS)
        assert all(ends(pid, 2 * SECONDS) for pid in workers)


def test_ctrl_c_ends_everything_quietly(tiny: Callable[..., Path]) -> None:
    """SIGINT: exit code 130, no traceback, no worker left."""
    with generating(tiny("llama")) as (process, workers):
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=10)
        assert process.returncode == 130
        assert "Traceback" not in stderr
        assert all(ends(pid, SECONDS) for pid in workers)
