"""A pipeline whose stages are threads of this process.

Made for parity and debugging: the threads share one MLX, so two of them reach about 1.5
times the speed of one. Throughput wants a process for each stage.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from mlxcel.errors import ChannelClosed, DeadlineError, MlxcelError, StageError
from mlxcel.pipeline.link import Link, memory_link
from mlxcel.pipeline.pipeline import OnProgress, StageStatus
from mlxcel.pipeline.report import Ended, Failed, Loaded, Loading, Report
from mlxcel.pipeline.step import Step, StepFailed, Stop, Tokens
from mlxcel.pipeline.worker import run_stage
from mlxcel.stage.contract import StageExecutor, StageSpec


class ThreadPipeline:
    """One thread per stage, in-memory links between them.

    Args:
        specs: The stages, in order.
        build: Makes the executor of a spec; called in the stage's own thread.
        credits: Steps in flight at most; the capacity of every link.
        timeout: Seconds any one wait may last.
        wrap: Puts something around each link, such as the wire format.
    """

    def __init__(
        self,
        specs: Sequence[StageSpec],
        build: Callable[[StageSpec], StageExecutor],
        *,
        credits: int,
        timeout: float,
        wrap: Callable[[Link], Link] = lambda link: link,
    ) -> None:
        self.credits = credits
        self._timeout = timeout
        self._reports: SimpleQueue[Report] = SimpleQueue()
        names = ["engine", *(f"stage {spec.index}" for spec in specs), "engine"]
        # One more place than credits, so that the final Stop always fits.
        self._links = [
            wrap(memory_link(credits + 1, f"{a} to {b}"))
            for a, b in itertools.pairwise(names)
        ]
        self._loaded: dict[int, Loaded] = {}
        self._ended: dict[int, Ended] = {}
        self._threads = [
            threading.Thread(
                target=run_stage,
                args=(spec, build, *self._links[i : i + 2], self._reports.put),
                name=f"mlxcel-stage-{spec.index}",
            )
            for i, spec in enumerate(specs)
        ]

    def start(self, on_progress: OnProgress = lambda stage, done, total: None) -> None:
        """Load all stages side by side.

        Raises:
            MlxcelError: The first failure of a stage, as the stage raised it.
            DeadlineError: A stage made no progress for ``timeout`` seconds.
        """
        for thread in self._threads:
            thread.start()
        while len(self._loaded) < len(self._threads):
            match self._next_report(f"{len(self._threads)} stages to load"):
                case Loading(stage, done, total):
                    on_progress(stage, done, total)
                case Loaded() as loaded:
                    self._loaded[loaded.stage] = loaded
                case other:
                    self._note(other)

    @property
    def loaded(self) -> tuple[Loaded, ...]:
        """What each stage reported once it was ready, in order."""
        return tuple(done for _, done in sorted(self._loaded.items()))

    def submit(self, step: Step) -> None:
        """Hand a step to the first stage.

        Raises:
            StageError: A stage has ended; the cause is its own.
        """
        try:
            self._links[0].send(step)
        except ChannelClosed as closed:
            raise self._cause(closed) from closed

    def receive(self) -> Tokens | StepFailed:
        """The last stage's next answer.

        Raises:
            StageError: A stage has ended; the cause is its own.
            DeadlineError: No answer within ``timeout`` seconds.
        """
        try:
            answer = self._links[-1].receive(self._timeout)
        except ChannelClosed as closed:
            raise self._cause(closed) from closed
        assert isinstance(answer, Tokens | StepFailed), answer
        return answer

    def stop(self) -> tuple[StageStatus, ...]:
        """End all stages, also after a failure; nothing is left running. Again is harmless.

        Raises:
            DeadlineError: A thread is still in a step after ``timeout`` seconds.
        """
        # A stage that failed has closed its links, and the others find theirs closed in turn.
        with contextlib.suppress(ChannelClosed):
            self._links[0].send(Stop())
        deadline = time.monotonic() + self._timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise DeadlineError(thread.name, "its last step to end", self._timeout, _MORE_TIME)
        while not self._reports.empty():
            report = self._reports.get()
            if isinstance(report, Ended):
                self._ended[report.stage] = report
        return _status(self.loaded, self._ended)

    def _next_report(self, operation: str) -> Report:
        try:
            return self._reports.get(timeout=self._timeout)
        except Empty:
            raise DeadlineError("the pipeline", operation, self._timeout, _MORE_TIME) from None

    def _note(self, report: Report) -> None:
        if isinstance(report, Failed):
            raise _typed(report)
        if isinstance(report, Ended):
            self._ended[report.stage] = report

    def _cause(self, closed: ChannelClosed) -> MlxcelError:
        while not self._reports.empty():
            report = self._reports.get()
            if isinstance(report, Failed):
                return _typed(report)
        return closed


_MORE_TIME = "Give it more time with --pp-timeout SECONDS."


def _typed(failed: Failed) -> MlxcelError:
    if isinstance(failed.error, MlxcelError):
        return failed.error
    cause = f"{type(failed.error).__name__}: {failed.error}"
    error = StageError(failed.stage, "its work", cause)
    error.__cause__ = failed.error
    return error


def _status(loaded: Sequence[Loaded], ended: dict[int, Ended]) -> tuple[StageStatus, ...]:
    """Busy seconds of each stage within the window that all of them share."""
    firsts = [e.first for e in ended.values() if e.first is not None]
    lasts = [e.last for e in ended.values() if e.last is not None]
    span = max(lasts) - min(firsts) if firsts and lasts else 0.0
    return tuple(
        StageStatus(
            done.stage, done.bytes, ended[done.stage].busy if done.stage in ended else 0.0, span
        )
        for done in loaded
    )
