"""The supervisor's handle of real worker processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from mlxcel.cluster.worker_process import FromStage, WorkerProcess
from mlxcel.errors import DeadlineError, WorkerNotStarted, WorkerStartError
from mlxcel.pipeline.control import DataSocket, Job
from mlxcel.pipeline.report import Ended, Failed, Hello, Loaded
from mlxcel.pipeline.socket_link import ConnectionInbox, ConnectionOutbox
from mlxcel.pipeline.step import Stop
from mlxcel.stage.contract import StageSpec
from mlxcel.transport.plain import PlainConnection

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

Tiny = Callable[..., Path]
WAIT = 60.0


class Watched:
    """A worker, and what the supervisor hears of it."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[FromStage] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.worker: WorkerProcess

    async def start(self, **environment: str) -> WorkerProcess:
        self.worker = await WorkerProcess.start(
            environment=environment,
            without=[],
            on_report=self.reports.put_nowait,
            on_end=self.ended.set,
        )
        return self.worker

    async def report(self, kind: type) -> Any:
        """The next report of this kind."""
        async with asyncio.timeout(WAIT):
            while not isinstance(report := await self.reports.get(), kind):
                assert not isinstance(report, Failed), report.error
            return report


def run(work: Callable[[Watched], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` in an event loop; its worker is gone afterwards."""

    async def within() -> None:
        watched = Watched()
        try:
            await work(watched)
        finally:
            await watched.worker.end(0.0)
        assert not Path(f"/proc/{watched.worker.pid}").exists()

    asyncio.run(within())


def test_a_worker_serves_a_stage_and_ends(tiny: Tiny) -> None:
    """It says hello, takes a job and sockets, loads, passes the Stop on, and says how it ended."""

    async def work(watched: Watched) -> None:
        worker = await watched.start()
        hello = await worker.armed(WAIT)
        assert (hello.pid, hello.device) == (worker.pid, "cpu")
        assert {"mlxcel", "mlx", "mlx-lm", "BLAS"} <= hello.software.versions.keys()
        to_it, receiving = socket.socketpair()
        from_it, sending = socket.socketpair()
        worker.give(
            Job(StageSpec(tiny("llama"), "llama", 0, 1, 0, 6), 4, WAIT),
            [
                (DataSocket("receive", "in", "a"), receiving),
                (DataSocket("send", "out", "b"), sending),
            ],
        )
        assert receiving.fileno() == sending.fileno() == -1  # the worker alone has them now
        assert (await watched.report(Loaded)).bytes > 0
        assert worker.silent < WAIT
        ConnectionOutbox(PlainConnection(to_it, "worker"), "in", WAIT, lambda v: v).send(Stop())
        inbox = ConnectionInbox(PlainConnection(from_it, "worker"), "out", 4)
        assert await asyncio.to_thread(inbox.receive, WAIT) == Stop()
        await watched.report(Ended)
        await asyncio.wait_for(watched.ended.wait(), WAIT)
        assert worker.how == "exit code 0"

    run(work)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_armed_worker_that_is_lost(number: signal.Signals) -> None:
    """A killed one is told in words; a stopped one grows silent, and can be ended all the same."""

    async def work(watched: Watched) -> None:
        worker = await watched.start()
        await worker.armed(WAIT)
        os.kill(worker.pid, number)
        if number == signal.SIGSTOP:
            async with asyncio.timeout(WAIT):
                while worker.silent < 1.5:
                    await asyncio.sleep(0.05)
            await worker.end(0.1)
        await asyncio.wait_for(watched.ended.wait(), WAIT)
        assert worker.how == "killed by SIGKILL"
        with pytest.raises(WorkerStartError, match=r"has ended: killed by SIGKILL"):
            worker.give(Job(StageSpec(Path("x"), "x", 0, 1, 0, 1), 1, 1.0), [])

    run(work)


def test_a_worker_that_cannot_start_says_how_it_ended(tmp_path: Path) -> None:
    """A broken installation is told at once, not after a deadline."""
    (tmp_path / "attrs").mkdir()
    (tmp_path / "attrs" / "__init__.py").write_text("raise SystemExit(3)")

    async def work(watched: Watched) -> None:
        worker = await watched.start(PYTHONPATH=str(tmp_path))
        with pytest.raises(WorkerStartError, match="exit code 3") as caught:
            await worker.armed(WAIT)
        assert caught.value.pid == worker.pid

    run(work)


@pytest.mark.parametrize("failing", ["socket.socketpair", "asyncio.create_subprocess_exec"])
def test_a_machine_that_has_no_room_for_a_worker(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the system is a typed error with its cause, and no socket is left open."""

    def fails(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    pairs: list[tuple[socket.socket, socket.socket]] = []
    make_pair = socket.socketpair

    def noted() -> tuple[socket.socket, socket.socket]:
        pairs.append(make_pair())
        return pairs[-1]

    async def work() -> None:
        module = "mlxcel.cluster.worker_process."
        monkeypatch.setattr(module + "socket.socketpair", noted)
        monkeypatch.setattr(module + failing, fails)
        with pytest.raises(WorkerNotStarted, match="Resource temporarily unavailable"):
            await WorkerProcess.start(
                environment={}, without=[], on_report=print, on_end=lambda: None
            )

    asyncio.run(work())
    assert [sock.fileno() for pair in pairs for sock in pair] == [-1, -1] * len(pairs)


def test_a_worker_that_takes_too_long_is_a_deadline() -> None:
    """The error names the process and what it was at."""

    async def work(watched: Watched) -> None:
        worker = await watched.start()
        with pytest.raises(DeadlineError, match=rf"process {worker.pid}\).*its imports"):
            await worker.armed(0.0)

    run(work)


def test_a_worker_ends_with_its_supervisor() -> None:
    """When the supervisor is killed, its armed worker goes too; nobody is left."""
    source = (
        "import asyncio\n"
        "from mlxcel.cluster.worker_process import WorkerProcess\n"
        "async def main():\n"
        "    worker = await WorkerProcess.start(environment={}, without=[],\n"
        "        on_report=print, on_end=print)\n"
        "    await worker.armed(60)\n"
        "    print(worker.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        worker = os.pidfd_open(int(supervisor.stdout.readline()))
        supervisor.kill()
    try:
        loop_ends(worker)
    finally:
        os.close(worker)


def loop_ends(pidfd: int) -> None:
    import select

    assert select.select([pidfd], [], [], WAIT)[0]


def test_hello_is_of_the_process_that_has_the_environment() -> None:
    """What the worker finds in its environment, it runs with."""

    async def work(watched: Watched) -> None:
        worker = await watched.start(MLXCEL_DISABLE_PLUGINS="llama")
        hello: Hello = await worker.armed(WAIT)
        assert "family llama" not in hello.software.versions
        assert "family jamba" in hello.software.versions

    run(work)
