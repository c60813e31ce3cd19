"""The one place where the reports of all stages of a pipeline arrive."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from mlxcel.pipeline.report import Beat, Report

OnBeat = Callable[[Beat], None]
"""Called with each beat in whichever thread brings it; must be quick, and safe for threads."""


class ReportQueue:
    """Reports wait here until somebody reads them; beats never wait.

    A stage sends few reports while it starts and ends, but beats for as long as it works, when
    nobody reads. So a beat goes to ``on_beat`` at once or is forgotten, and the queue stays short.
    """

    def __init__(self) -> None:
        self.on_beat: OnBeat = lambda beat: None
        self._waiting: SimpleQueue[Report] = SimpleQueue()

    def put(self, report: Report) -> None:
        """Take a report, in any thread."""
        if isinstance(report, Beat):
            self.on_beat(report)
        else:
            self._waiting.put(report)

    def get(self, timeout: float | None = None) -> Report:
        """The oldest report that waits; waits for one up to ``timeout`` seconds.

        Raises:
            queue.Empty: None came in time.
        """
        return self._waiting.get(timeout=timeout)

    def drain(self) -> list[Report]:
        """All that wait now."""
        reports = []
        while True:
            try:
                reports.append(self._waiting.get_nowait())
            except Empty:
                return reports
