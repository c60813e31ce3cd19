"""Where the reports of all stages arrive."""

from __future__ import annotations

from queue import Empty

import pytest

from mlxcel.pipeline.report import Beat, Ended, Loaded
from mlxcel.pipeline.report_queue import ReportQueue


def test_beats_pass_by_those_that_wait() -> None:
    """A beat is heard at once, by whoever listens; others stand in line."""
    queue, heard = ReportQueue(), []
    queue.on_beat = heard.append
    loaded, beat, ended = Loaded(0, 1, 1.0), Beat(0, 1.0, 0.5, 3), Ended(0, 0.5, 0.0, 1.0)
    for report in (loaded, beat, ended):
        queue.put(report)
    assert heard == [beat]
    assert queue.get() == loaded
    assert queue.drain() == [ended]


def test_beats_that_nobody_hears_are_forgotten() -> None:
    """A pipeline that runs for months keeps none of its beats."""
    queue = ReportQueue()
    for _ in range(10_000):
        queue.put(Beat(0, 0.5, 0.25, 1))
    assert queue.drain() == []
    with pytest.raises(Empty):
        queue.get(timeout=0.0)
