"""Keeps a peer's worker ready: one process at a time, a fresh one after each session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from mlxcel.cluster.worker_process import FromStage, WorkerProcess
from mlxcel.errors import MlxcelError, WorkerNotReady, WorkerStartError
from mlxcel.pipeline.report import Hello

ARM_SECONDS = 120.0
"""How long a worker may take for its imports, from a cold disk."""

END_SECONDS = 3.0
"""How long a worker may take to end: it may finish the step that runs."""

STOPPED_SECONDS = 2.0
"""After so much silence it is not waited for."""

READY_SECONDS = 20.0
"""How long somebody who needs a worker waits for one; a coordinator waits longer for its answer."""

LONGEST_PAUSE = 10.0
"""Between two attempts to arm a worker that dies each time; whoever waits sees another attempt."""

StartWorker = Callable[..., Coroutine[Any, Any, WorkerProcess]]


class Armory:
    """Starts workers, and starts another when one has been used or has died.

    Args:
        environment: What workers have in their environment beyond this process's.
        without: Plugins that the user left out.
        on_report: Called with what the worker in use says.
        on_death: Called with its process number and how it ended, when the worker in use has
            ended before it was given back.
        say: Takes lines for the operator.
        start: For tests.

    Attributes:
        hello: What the latest worker said of itself.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        without: Sequence[str],
        on_report: Callable[[FromStage], None],
        on_death: Callable[[int, str], None],
        say: Callable[[str], None],
        start: StartWorker = WorkerProcess.start,
    ) -> None:
        self.hello: Hello | None = None
        self._environment = environment
        self._without = without
        self._on_report = on_report
        self._on_death = on_death
        self._say = say
        self._start = start
        self._worker: WorkerProcess | None = None
        self._in_use = False
        self._problem = ""  # why the last attempt to arm a worker failed
        self._used_up = asyncio.Event()
        self._armed = asyncio.Event()
        self._free = asyncio.Event()

    async def open(self) -> Hello:
        """Start the first worker; :meth:`keep` is for all others.

        Raises:
            MlxcelError: It does not come up.
        """
        return await self._arm()

    async def keep(self) -> None:
        """Replace each worker that is used up or has died, until cancelled."""
        while True:
            await self._used_up.wait()
            await self._end()
            await self._arm_again()

    async def ready(self) -> WorkerProcess:
        """The worker, when one is armed and alive; by then all memory of the last one is free.

        Raises:
            WorkerNotReady: There is none within :data:`READY_SECONDS`.
        """
        try:
            async with asyncio.timeout(READY_SECONDS):
                while True:
                    await self._armed.wait()
                    if (worker := self._worker) is not None and worker.silent <= STOPPED_SECONDS:
                        return worker
                    self._discard()
        except TimeoutError:
            raise WorkerNotReady(READY_SECONDS, self._problem) from None

    async def take(self) -> WorkerProcess:
        """The worker, to be used.

        Raises:
            WorkerNotReady: As :meth:`ready` does.
        """
        worker = await self.ready()
        self._in_use = True
        return worker

    def give_back(self) -> None:
        """The worker is of no more use: it ends, and another is started."""
        if self._in_use:
            self._in_use = False
            self._discard()

    @property
    def free(self) -> bool:
        """Whether no worker that was given back still holds its memory."""
        return self._free.is_set()

    @property
    def silent(self) -> float | None:
        """Seconds since the last sign of life of the worker in use; None if none is."""
        return self._worker.silent if self._in_use and self._worker is not None else None

    async def close(self) -> None:
        """End the worker, when nobody keeps it any more."""
        await self._end()

    async def _arm_again(self) -> None:
        pause = 1.0
        while True:
            try:
                await self._arm()
            except MlxcelError as error:
                self._problem = str(error)
                self._say(f"no worker: {error} Trying again in {pause:g} s.")
                await self._end()
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                return

    async def _arm(self) -> Hello:
        worker = self._worker = await self._start(
            environment=self._environment,
            without=self._without,
            on_report=self._hear,
            on_end=self._ended,
        )
        self._used_up.clear()
        self.hello = await worker.armed(ARM_SECONDS)
        if worker.how is not None:
            raise WorkerStartError(worker.pid, worker.how)
        self._problem = ""
        self._armed.set()
        self._free.set()
        self._say(f"armed: worker process {worker.pid} waits on the {self.hello.device}")
        return self.hello

    async def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.end(0.0 if worker.silent > STOPPED_SECONDS else END_SECONDS)
        self._free.set()

    def _discard(self) -> None:
        self._armed.clear()
        self._free.clear()
        self._used_up.set()

    def _hear(self, report: FromStage) -> None:
        if self._in_use:  # what one says that was given back is of no interest
            self._on_report(report)

    def _ended(self) -> None:
        worker = self._worker
        if worker is None or worker.how is None:
            return
        if self._in_use:
            self._in_use = False
            self._on_death(worker.pid, worker.how)
        elif self._armed.is_set():
            self._say(f"the worker process {worker.pid} has ended: {worker.how}")
        self._discard()
