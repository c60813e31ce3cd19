"""A pipeline whose stages are workers on this machine: threads or processes.

What both have in common: the first link takes steps, the last one brings answers, and
reports come through one queue.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from queue import Empty

from mlxcel.errors import (
    ChannelClosed,
    DeadlineError,
    MlxcelError,
    RankLinkBroken,
    StageError,
)
from mlxcel.pipeline.accusation import accusation, broken_connection, root_accusation
from mlxcel.pipeline.link import Inbox, Outbox
from mlxcel.pipeline.pipeline import OnProgress, StageStatus
from mlxcel.pipeline.report import Ended, Failed, Loaded, Loading, Report
from mlxcel.pipeline.report_queue import ReportQueue
from mlxcel.pipeline.step import Step, StepFailed, Stop, Tokens

MORE_TIME = "Give it more time with --pp-timeout SECONDS."

GIVE_UP_SECONDS = 5.0
"""How long a worker may take to end when its work is given up."""

LOOK_SECONDS = 0.25
"""How often whoever waits for the stages to load is asked whether it still wants them."""

CAUSE_SECONDS = 2.0
"""How long to wait for the report that explains why a link is closed."""


class WorkerPipeline(ABC):
    """See :class:`mlxcel.pipeline.pipeline.Pipeline`; subclasses launch and join the workers.

    Args:
        count: The number of stages.
        credits: Steps in flight at most.
        timeout: Seconds any one wait may last.
        ranks: Workers of each stage.

    Attributes:
        reports: What the workers report. Whoever wants to hear their beats sets its ``on_beat``.
        loaded: One for each stage: the bytes of its ranks together, and the time of the slowest.
        loaded_ranks: One for each worker, those of a stage one after the other.
    """

    def __init__(self, count: int, *, credits: int, timeout: float, ranks: int = 1) -> None:
        self.count = count
        self.ranks = ranks
        self.credits = credits
        self.timeout = timeout
        self.reports = ReportQueue()
        self.loaded: tuple[Loaded, ...] = ()
        self.loaded_ranks: tuple[Loaded, ...] = ()
        self._ended: dict[tuple[int, int], Ended] = {}
        self._first: Outbox | None = None
        self._last: Inbox | None = None

    @abstractmethod
    def _launch(self) -> tuple[Outbox, Inbox]:
        """Start the workers; returns the way to the first stage and the way from the last."""

    @abstractmethod
    def _join(self, deadline: float) -> None:
        """Wait until ``deadline`` (monotonic) for the workers to end; leave none running."""

    def start(self, on_progress: OnProgress = lambda stage, done, total: None) -> None:
        """Load all stages side by side.

        Raises:
            MlxcelError: The first failure of a stage, as the stage raised it.
            DeadlineError: No worker made progress for ``timeout`` seconds; those that are not
                ready are named.
        """
        self._first, self._last = self._launch()
        loaded: dict[tuple[int, int], Loaded] = {}
        loading: dict[tuple[int, int], Loading] = {}
        latest, heard = (0, 0, 0), time.monotonic()
        while len(loaded) < self.count * self.ranks:
            report = self._next_report(heard + self.timeout, loaded)
            if report is None:
                on_progress(*latest)
                continue
            heard = time.monotonic()
            match report:
                case Loading(stage):
                    loading[stage, report.rank] = report
                    latest = _progress(stage, loading.values())
                    on_progress(*latest)
                case Loaded():
                    loaded[report.stage, report.rank] = report
                case Failed():
                    raise _typed(self._first_failure(report) or report)
        self.loaded_ranks = tuple(done for _, done in sorted(loaded.items()))
        self.loaded = tuple(
            Loaded(stage, sum(done.bytes for done in ranks), max(done.seconds for done in ranks))
            for stage, ranks in _by_stage(self.loaded_ranks)
        )

    def submit(self, step: Step) -> None:
        """Hand a step to the first stage.

        Raises:
            MlxcelError: A stage has ended; the error is its own.
        """
        assert self._first is not None, "start() comes first"
        try:
            self._first.send(step)
        except ChannelClosed as closed:
            raise self._cause(closed) from closed

    def receive(self) -> Tokens | StepFailed:
        """The last stage's next answer.

        Raises:
            MlxcelError: A stage has ended; the error is its own.
            DeadlineError: No answer within ``timeout`` seconds.
        """
        assert self._last is not None, "start() comes first"
        try:
            answer = self._last.receive(self.timeout)
        except ChannelClosed as closed:
            raise self._cause(closed) from closed
        except DeadlineError as late:
            last = self._who(self.count - 1, 0)
            raise DeadlineError(last, "a step's result", self.timeout, MORE_TIME) from late
        assert isinstance(answer, Tokens | StepFailed), answer
        return answer

    def poll(self) -> Tokens | StepFailed | None:
        """The last stage's next answer if it is there already.

        Raises:
            MlxcelError: A stage has ended; the error is its own.
        """
        assert self._last is not None, "start() comes first"
        try:
            answer = self._last.poll()
        except ChannelClosed as closed:
            raise self._cause(closed) from closed
        assert isinstance(answer, Tokens | StepFailed | None), answer
        return answer

    def listen(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called, in whichever thread, when there may be something to poll."""
        assert self._last is not None, "start() comes first"
        self._last.listen(listener)

    def take_hops(self) -> tuple[float, ...]:
        """What recent answers took from the last stage to here, in microseconds."""
        return () if self._last is None else self._last.take_hops()

    def stop(self, *, drain: bool = True) -> tuple[StageStatus, ...]:
        """End all stages; nothing is left running. Again is harmless.

        Args:
            drain: Let the steps in flight finish; without it they are given up.

        Raises:
            DeadlineError: A worker is still in a step when the time is over.
        """
        if drain and self._first is not None:
            # A stage that failed has closed its links, and the others find theirs closed.
            with contextlib.suppress(ChannelClosed):
                self._first.send(Stop())
        elif self._first is not None and self._last is not None:
            self._first.close("given up")
            self._last.close("given up")
        self._join(time.monotonic() + (self.timeout if drain else GIVE_UP_SECONDS))
        for report in self.reports.drain():
            if isinstance(report, Ended):
                self._ended[report.stage, report.rank] = report
        return _statuses(self.loaded, self._ended)

    def _next_report(self, deadline: float, loaded: Container[tuple[int, int]]) -> Report | None:
        """The next report; None if there is none for a moment.

        Args:
            loaded: The stages and ranks that are ready.
        """
        left = deadline - time.monotonic()
        try:
            return self.reports.get(timeout=max(0.0, min(left, LOOK_SECONDS)))
        except Empty:
            if left > 0:
                return None
            late = ", ".join(
                self._who(stage, rank)
                for stage in range(self.count)
                for rank in range(self.ranks)
                if (stage, rank) not in loaded
            )
            raise DeadlineError(late, "it to load", self.timeout, MORE_TIME) from None

    def _who(self, stage: int, rank: int) -> str:
        """What errors call a worker."""
        return f"stage {stage}" if self.ranks == 1 else f"rank {rank} of stage {stage}"

    def _cause(self, closed: ChannelClosed) -> MlxcelError:
        """Why a link is closed: the failure that a stage has reported, or is about to."""
        failed = self._first_failure()
        return closed if failed is None else _typed(failed)

    def _first_failure(self, failed: Failed | None = None) -> Failed | None:
        """The failure that all others follow from, if one is reported within a moment.

        Who loses a rank only says what it saw; that rank, or whoever watches it, says why. If
        nobody does, it may have been their connection.

        Args:
            failed: What has been reported already.
        """
        deadline = time.monotonic() + CAUSE_SECONDS
        heard = [] if failed is None else [failed]
        while not heard or accusation(heard[-1]):
            try:
                report = self.reports.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return _between_ranks(heard, self._ended)
            match report:
                case Failed():
                    heard.append(report)
                case Ended():
                    self._ended[report.stage, report.rank] = report
        return heard[-1]


def _between_ranks(heard: Sequence[Failed], ended: Container[tuple[int, int]]) -> Failed | None:
    """What ranks that only accuse each other have in common, else what the one says that knows."""
    accusations = [said for failed in heard if (said := accusation(failed))]
    if broken := broken_connection(accusations, ended):
        (stage, rank), (_, other) = broken.reporter, broken.accused
        return Failed(stage, RankLinkBroken(stage, rank, other, broken.broken), rank)
    if not heard:
        return None
    root = root_accusation(accusations)
    return next(failed for failed in heard if accusation(failed) == root)


def _progress(stage: int, loading: Iterable[Loading]) -> tuple[int, int, int]:
    """``stage`` with the bytes done and in all of those of its ranks that have said any."""
    own = [report for report in loading if report.stage == stage]
    return stage, sum(report.done for report in own), sum(report.total for report in own)


def _by_stage(reports: Iterable[Loaded]) -> Iterator[tuple[int, list[Loaded]]]:
    for stage, ranks in itertools.groupby(reports, key=lambda report: report.stage):
        yield stage, list(ranks)


def _typed(failed: Failed) -> MlxcelError:
    if isinstance(failed.error, MlxcelError):
        return failed.error
    cause = f"{type(failed.error).__name__}: {failed.error}"
    error = StageError(failed.stage, "its work", cause)
    error.__cause__ = failed.error
    return error


def _statuses(
    loaded: Sequence[Loaded], ended: Mapping[tuple[int, int], Ended]
) -> tuple[StageStatus, ...]:
    """Busy seconds of each stage, its busiest rank's, within the window that all of them share."""
    firsts = [e.first for e in ended.values() if e.first is not None]
    lasts = [e.last for e in ended.values() if e.last is not None]
    span = max(lasts) - min(firsts) if firsts and lasts else 0.0
    busy: dict[int, float] = {}
    for (stage, _), end in ended.items():
        busy[stage] = max(end.busy, busy.get(stage, 0.0))
    return tuple(
        StageStatus(done.stage, done.bytes, busy.get(done.stage, 0.0), span) for done in loaded
    )
