"""One armed worker at a time, with workers that only pretend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mlxcel.cluster import armory
from mlxcel.cluster.armory import Armory
from mlxcel.errors import MlxcelError, WorkerNotReady, WorkerNotStarted, WorkerStartError
from mlxcel.pipeline.report import Beat, Hello, Software

WAIT = 10.0
BEAT = Beat(0, 1.0, 0.5, 3)


class FakeWorker:
    """A worker that arms when it is told to."""

    def __init__(self, pid: int, on_report: Callable[[Any], None], on_end: Callable[[], None]):
        self.pid = pid
        self.how: str | None = None
        self.silent = 0.0
        self.report = on_report
        self.ended = asyncio.Event()
        self.ready: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self.hold = asyncio.Event()
        self.hold.set()
        self._on_end = on_end

    async def armed(self, timeout: float) -> Hello:
        return await self.ready

    def arm(self) -> None:
        self.ready.set_result(Hello(self.pid, Software({}), "gpu"))

    def die(self, how: str) -> None:
        self.how = how
        if not self.ready.done():
            self.ready.set_exception(WorkerStartError(self.pid, how))
        self.ended.set()
        self._on_end()

    async def end(self, grace: float) -> None:
        await self.hold.wait()
        if self.how is None:
            self.die(f"ended with {grace:g} s")


class Workshop:
    """Makes fake workers; the armory's whole world."""

    def __init__(self) -> None:
        self.made: asyncio.Queue[FakeWorker] = asyncio.Queue()
        self.alive: list[FakeWorker] = []
        self.heard: list[Any] = []
        self.deaths: list[tuple[int, str]] = []
        self.lines: list[str] = []
        self.armory = Armory(
            environment={},
            without=[],
            on_report=self.heard.append,
            on_death=lambda pid, how: self.deaths.append((pid, how)),
            say=self.lines.append,
            start=self.start,
        )
        self.keeping: asyncio.Task[None] | None = None
        self.problems: list[MlxcelError] = []
        self._count = 0

    async def start(self, *, on_report: Any, on_end: Any, **_: Any) -> Any:
        assert all(worker.how is not None for worker in self.alive), "two at once"
        if self.problems:
            raise self.problems.pop()
        self._count += 1
        worker = FakeWorker(self._count, on_report, on_end)
        self.alive.append(worker)
        self.made.put_nowait(worker)
        return worker

    async def next(self) -> FakeWorker:
        return await self.made.get()

    async def open(self) -> FakeWorker:
        """The first worker, armed."""
        opening = asyncio.ensure_future(self.armory.open())
        worker = await self.next()
        worker.arm()
        await opening
        self.keeping = asyncio.ensure_future(self.armory.keep())
        return worker

    async def close(self) -> None:
        if self.keeping is not None:
            self.keeping.cancel()
            await asyncio.wait([self.keeping])
        await self.armory.close()


def run(work: Callable[[Workshop], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        workshop = Workshop()
        async with asyncio.timeout(WAIT):
            await work(workshop)
            await workshop.close()
        assert all(worker.how is not None for worker in workshop.alive)

    asyncio.run(within())


def test_the_first_worker_must_come_up() -> None:
    """A peer whose worker cannot start does not pretend to be ready."""

    async def work(workshop: Workshop) -> None:
        opening = asyncio.ensure_future(workshop.armory.open())
        (await workshop.next()).die("exit code 1")
        with pytest.raises(WorkerStartError, match="exit code 1"):
            await opening

    run(work)


def test_a_used_worker_is_replaced_by_a_fresh_one() -> None:
    """The old one ends first, so that there is one at a time and its memory is back."""

    async def work(workshop: Workshop) -> None:
        first = await workshop.open()
        armory = workshop.armory
        assert armory.silent is None
        assert await armory.take() is first
        first.silent = 1.25
        assert armory.silent == 1.25
        first.hold.clear()
        armory.give_back()
        assert armory.silent is None
        taken = asyncio.ensure_future(armory.take())
        await asyncio.sleep(0)
        assert not armory.free
        first.hold.set()
        second = await workshop.next()
        assert armory.free
        assert first.how == f"ended with {3:g} s"
        assert not taken.done()
        second.arm()
        assert await taken is second
        assert workshop.deaths == []

    run(work)


def test_an_unused_worker_is_kept() -> None:
    """A session that ends before its stage starts costs no worker."""

    async def work(workshop: Workshop) -> None:
        first = await workshop.open()
        workshop.armory.give_back()
        assert workshop.armory.free
        assert await workshop.armory.take() is first

    run(work)


def test_a_silent_worker_is_not_waited_for() -> None:
    """One that stands still cannot end by itself."""

    async def work(workshop: Workshop) -> None:
        first = await workshop.open()
        await workshop.armory.take()
        first.silent = 60.0
        workshop.armory.give_back()
        (await workshop.next()).arm()
        assert first.how == "ended with 0 s"

    run(work)


def test_a_worker_that_was_stopped_at_rest_is_not_used() -> None:
    """Whoever takes one gets one that gives signs of life."""

    async def work(workshop: Workshop) -> None:
        first = await workshop.open()
        first.silent = 60.0
        taken = asyncio.ensure_future(workshop.armory.take())
        second = await workshop.next()
        assert first.how == "ended with 0 s"
        second.arm()
        assert await taken is second

    run(work)


def test_a_death_in_use_is_told_and_another_armed() -> None:
    """Who uses the worker learns its number and how it ended."""

    async def work(workshop: Workshop) -> None:
        first = await workshop.open()
        await workshop.armory.take()
        first.report(BEAT)
        first.die("killed by SIGKILL")
        first.report(BEAT)
        assert (workshop.heard, workshop.deaths) == ([BEAT], [(1, "killed by SIGKILL")])
        (await workshop.next()).arm()
        workshop.armory.give_back()  # of the dead one; the new one stays
        assert (await workshop.armory.take()).pid == 2

    run(work)


def test_a_death_at_rest_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another is armed; one that cannot start is tried again after a pause."""
    pauses: list[float] = []

    async def work(workshop: Workshop) -> None:
        sleep = asyncio.sleep

        async def paused(seconds: float) -> None:
            pauses.append(seconds)
            await sleep(0)

        monkeypatch.setattr(armory.asyncio, "sleep", paused)
        (await workshop.open()).die("killed by SIGKILL")
        for _ in range(7):
            (await workshop.next()).die("exit code 1")
        (await workshop.next()).arm()
        assert (await workshop.armory.take()).pid == 9
        assert workshop.deaths == []
        assert "worker process 1 has ended: killed by SIGKILL" in workshop.lines[1]
        assert "exit code 1" in workshop.lines[2] and "Trying again in 1 s" in workshop.lines[2]

    run(work)
    assert pauses == [1, 2, 4, 8, 10, 10, 10]


def test_a_worker_that_cannot_be_started_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who needs one learns why there is none, also when it was promised one before."""
    monkeypatch.setattr(armory, "READY_SECONDS", 0.05)

    async def work(workshop: Workshop) -> None:
        first = await workshop.open()
        assert await workshop.armory.ready() is first
        first.die("killed by SIGKILL")
        second = await workshop.next()
        with pytest.raises(WorkerNotReady, match="it is still being started"):
            await workshop.armory.take()
        second.die("exit code 1")
        with pytest.raises(WorkerNotReady, match=r"process 2.* has ended: exit code 1"):
            await workshop.armory.ready()
        with pytest.raises(WorkerNotReady, match="exit code 1"):
            await workshop.armory.take()
        assert workshop.armory.silent is None

    run(work)


def test_a_process_that_the_system_does_not_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that is full for a moment costs one attempt, and whoever waits learns of it."""
    monkeypatch.setattr(armory, "READY_SECONDS", 0.05)

    async def work(workshop: Workshop) -> None:
        go, sleep = asyncio.Event(), asyncio.sleep

        async def paused(seconds: float) -> None:
            await (go.wait() if seconds else sleep(0))

        monkeypatch.setattr(armory.asyncio, "sleep", paused)
        first = await workshop.open()
        workshop.problems.append(WorkerNotStarted("Resource temporarily unavailable"))
        first.die("killed by SIGKILL")
        with pytest.raises(WorkerNotReady, match="Resource temporarily unavailable"):
            await workshop.armory.take()
        monkeypatch.undo()
        go.set()
        second = await workshop.next()
        second.arm()
        assert await workshop.armory.take() is second

    run(work)


def test_closing_ends_a_worker_that_is_not_ready() -> None:
    """Ctrl-C during the imports leaves nobody behind."""

    async def work(workshop: Workshop) -> None:
        opening = asyncio.ensure_future(workshop.armory.open())
        await workshop.next()
        opening.cancel()
        await asyncio.wait([opening])

    run(work)
