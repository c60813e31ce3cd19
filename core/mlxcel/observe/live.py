"""What a pipeline is doing now: figures of the last minutes, from the beats of its stages.

Nothing here asks or polls. A stage that works beats; one that is quiet is idle, which the time
tells. So reading costs when somebody reads, and an idle pipeline costs nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import attrs

from mlxcel.pipeline.report import Beat

HISTORY_SECONDS = 120
"""How far back the figures go."""

LAG_SECONDS = 0.75
"""The most recent past, of which not all beats may have come yet; figures leave it out."""

KEPT_HOPS = 512
"""Of how many recent messages the latencies between two neighbours are."""

QUANTILES = (0.5, 0.95, 0.99)

ENGINE = "engine"
"""What the engine is called as a neighbour of the first and of the last stage."""


@attrs.frozen
class StageFigures:
    """One stage in the last seconds.

    ``busy`` is the share of that time in which it computed, ``bubble`` the share in which it
    waited although the pipeline had work: of the time in which any stage computed. ``received`` are
    bytes per second that came over a wire, ``received_total`` all that ever did. ``memory`` are
    the bytes that MLX held at its last beat, 0 if none has come.

    Of a stage whose ranks are workers of their own, bytes are those of all ranks, and shares of
    time those of rank 0: they work in step.
    """

    stage: int
    busy: float
    bubble: float
    received: float
    memory: int
    received_total: int = 0


@attrs.frozen
class HopFigures:
    """Microseconds that messages took from ``source`` to ``target``, which are neighbours.

    ``quantiles`` are those of :data:`QUANTILES` over recent messages; ``count``, ``total`` and
    ``largest`` are of all that were measured.
    """

    source: str
    target: str
    quantiles: tuple[float, ...]
    count: int
    total: float
    largest: float


@attrs.frozen
class Timeline:
    """Whole seconds one after another, the last of which is number ``last`` of the clock.

    ``busy`` has a row of shares for each stage, ``tokens`` those generated.
    """

    last: int
    busy: tuple[tuple[float, ...], ...]
    tokens: tuple[int, ...]


@attrs.frozen
class _Span:
    """A stretch of time of a stage: busy seconds and received bytes, both per second of it."""

    start: float
    stop: float
    busy: float
    received: float

    def within(self, start: float, stop: float) -> float:
        """Seconds of it that lie in a window."""
        return max(0.0, min(self.stop, stop) - max(self.start, start))


@attrs.define
class _Stage:
    spans: deque[_Span] = attrs.field(factory=deque)
    memory: dict[int, int] = attrs.field(factory=dict)  # by rank
    received: int = 0


@attrs.define
class _Hop:
    recent: deque[float] = attrs.field(factory=lambda: deque(maxlen=KEPT_HOPS))
    count: int = 0
    total: float = 0.0
    largest: float = 0.0


class LiveFigures:
    """Of a pipeline with ``count`` stages. Any thread may tell and ask.

    Args:
        count: The number of stages.
        clock: Seconds; never goes back.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = count
        self._clock = clock
        self._lock = threading.Lock()
        self._stages = [_Stage() for _ in range(count)]
        self._hops = [_Hop() for _ in range(count + 1)]
        self._tokens: deque[tuple[int, int]] = deque()
        self._generated = 0

    def beat(self, beat: Beat) -> None:
        """Hear a stage's beat, which ends now."""
        if not 0 <= beat.stage < self.count:
            return
        now = self._clock()
        with self._lock:
            stage = self._stages[beat.stage]
            stage.memory[beat.rank] = beat.memory or stage.memory.get(beat.rank, 0)
            stage.received += beat.received
            if beat.busy > 0 and beat.span > 0:
                share = 0.0 if beat.rank else min(1.0, beat.busy / beat.span)
                rate = beat.received / beat.span
                stage.spans.append(_Span(now - beat.span, now, share, rate))
            while stage.spans and stage.spans[0].stop < now - HISTORY_SECONDS - LAG_SECONDS - 1:
                stage.spans.popleft()
        self.hops(beat.stage, beat.hops)

    def hops(self, target: int, microseconds: Iterable[float]) -> None:
        """Hear what messages took to stage ``target``; number ``count`` is the engine."""
        with self._lock:
            hop = self._hops[target]
            for value in microseconds:
                value = max(0.0, value)  # clocks of two machines are never quite the same
                hop.recent.append(value)
                hop.count += 1
                hop.total += value
                hop.largest = max(hop.largest, value)

    def tokens(self, count: int) -> None:
        """Hear of ``count`` generated tokens."""
        second = math.floor(self._clock())
        with self._lock:
            self._generated += count
            if self._tokens and self._tokens[-1][0] == second:
                count += self._tokens.pop()[1]
            self._tokens.append((second, count))
            while self._tokens[0][0] < second - HISTORY_SECONDS - LAG_SECONDS:
                self._tokens.popleft()

    @property
    def generated(self) -> int:
        """Tokens so far."""
        return self._generated

    def stage_figures(self, seconds: float) -> tuple[StageFigures, ...]:
        """Each stage in the last ``seconds``."""
        stop = self._clock() - LAG_SECONDS
        start = stop - seconds
        with self._lock:
            spans = [tuple(stage.spans) for stage in self._stages]
            totals = [(sum(stage.memory.values()), stage.received) for stage in self._stages]
        # Beats of further ranks are out of phase with rank 0's, and have no time of their own.
        active = _covered([span for row in spans for span in row if span.busy], start, stop)
        figures = []
        for index, row in enumerate(spans):
            busy = sum(span.busy * span.within(start, stop) for span in row)
            received = sum(span.received * span.within(start, stop) for span in row)
            bubble = max(0.0, 1 - busy / active) if active else 0.0
            figures.append(
                StageFigures(index, busy / seconds, bubble, received / seconds, *totals[index])
            )
        return tuple(figures)

    def hop_figures(self) -> tuple[HopFigures, ...]:
        """Each pair of neighbours whose messages were measured, in the order of the pipeline."""
        names = [ENGINE, *map(str, range(self.count)), ENGINE]
        with self._lock:
            hops = [(sorted(hop.recent), hop.count, hop.total, hop.largest) for hop in self._hops]
        return tuple(
            HopFigures(
                names[target],
                names[target + 1],
                tuple(_quantile(ranked, q) for q in QUANTILES),
                count,
                total,
                largest,
            )
            for target, (ranked, count, total, largest) in enumerate(hops)
            if count
        )

    def tokens_per_second(self, seconds: int) -> float:
        """Tokens generated per second, over that many whole seconds."""
        return sum(self.timeline(seconds).tokens) / seconds

    def timeline(self, seconds: int = HISTORY_SECONDS) -> Timeline:
        """The last whole ``seconds`` of which everything is known."""
        last = math.floor(self._clock() - LAG_SECONDS) - 1
        numbers = range(last - seconds + 1, last + 1)
        with self._lock:
            spans = [tuple(stage.spans) for stage in self._stages]
            made = dict(self._tokens)
        return Timeline(
            last,
            tuple(_shares(row, numbers) for row in spans),
            tuple(made.get(number, 0) for number in numbers),
        )


def _shares(spans: Sequence[_Span], numbers: range) -> tuple[float, ...]:
    """The busy share of each of the seconds ``numbers``."""
    shares = [0.0] * len(numbers)
    for span in spans:
        first = max(numbers.start, math.floor(span.start))
        for number in range(first, min(numbers.stop, math.ceil(span.stop))):
            shares[number - numbers.start] += span.busy * span.within(number, number + 1)
    return tuple(min(1.0, share) for share in shares)


def _covered(spans: Sequence[_Span], start: float, stop: float) -> float:
    """Seconds of a window that lie in any of ``spans``."""
    covered, reached = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        begin, end = max(span.start, reached), min(span.stop, stop)
        if end > begin:
            covered += end - begin
            reached = end
    return covered


def _quantile(ranked: Sequence[float], q: float) -> float:
    """The nearest-rank quantile of what is sorted; 0 of nothing."""
    return ranked[max(0, math.ceil(q * len(ranked)) - 1)] if ranked else 0.0
