"""What a stage says of itself while it works: how busy it was, twice a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import attrs

from mlxcel.pipeline.link import Inbox
from mlxcel.pipeline.report import Beat

BEAT_SECONDS = 0.5
"""Between two beats of a stage that works."""


@attrs.define
class Meter:
    """Adds up what one stage does between two beats.

    All times are readings of one clock, in seconds. It is quiet until the first step begins,
    and again after a beat that had nothing to tell: idle time costs no beats.
    """

    stage: int
    rank: int = 0
    _since: float | None = None
    _began: float | None = None
    _busy: float = 0.0
    _steps: int = 0
    _memory: int = 0

    @property
    def quiet(self) -> bool:
        """Whether no beat is due until work comes."""
        return self._since is None

    def begin(self, now: float) -> None:
        """A step with work begins."""
        if self._since is None:
            self._since = now
        self._began = now

    def end(self, now: float, memory: int) -> None:
        """That step is over; ``memory`` are the bytes that the stage holds now."""
        assert self._began is not None, "begin() comes first"
        self._busy += now - self._began
        self._began = None
        self._steps += 1
        self._memory = memory

    def beat(self, now: float) -> Beat:
        """All since the last beat; of a step that still runs, the part until now."""
        assert self._since is not None, "nothing to tell"
        if self._began is not None:
            self._busy += now - self._began
            self._began = now
        span, memory = now - self._since, self._memory
        beat = Beat(self.stage, span, self._busy, self._steps, memory=memory, rank=self.rank)
        self._since = now if self._busy else None
        self._busy, self._steps = 0.0, 0
        return beat


class Pulse:
    """Reports the beats of one stage from a thread of its own, so that long steps show too.

    Args:
        stage: The stage's index.
        inbox: What its work comes through.
        report: Takes the beats, in that thread.
        rank: The worker's within the stage.
    """

    def __init__(
        self, stage: int, inbox: Inbox, report: Callable[[Beat], None], rank: int = 0
    ) -> None:
        self._meter = Meter(stage, rank)
        self._inbox = inbox
        self._report = report
        self._received = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"mlxcel-beat-{stage}", daemon=True)
        self._thread.start()

    def begin(self, now: float) -> None:
        """See :meth:`Meter.begin`."""
        with self._changed:
            if self._meter.quiet:
                self._changed.notify()
            self._meter.begin(now)

    def end(self, now: float, memory: int) -> None:
        """See :meth:`Meter.end`."""
        with self._changed:
            self._meter.end(now, memory)

    def close(self) -> None:
        """Report nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(BEAT_SECONDS)  # it ends by itself when what it reports is taken

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._meter.quiet)
                self._changed.wait_for(lambda: self._closed, BEAT_SECONDS)
                if self._closed:
                    return
                beat = self._meter.beat(time.perf_counter())
            # Outside the lock: a report that takes its time must not hold up the stage.
            received = self._inbox.received
            beat = attrs.evolve(
                beat, hops=self._inbox.take_hops(), received=received - self._received
            )
            self._received = received
            self._report(beat)
