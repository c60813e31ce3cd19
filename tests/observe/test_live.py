"""Live figures, from made-up beats and a clock that the test sets."""

from __future__ import annotations

import pytest

from mlxcel.observe.live import HISTORY_SECONDS, KEPT_HOPS, LAG_SECONDS, LiveFigures
from mlxcel.pipeline.report import Beat


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def live(clock: Clock) -> LiveFigures:
    return LiveFigures(2, clock)


def settle(clock: Clock) -> None:
    """Let the most recent past become known."""
    clock.now += LAG_SECONDS


def test_idle_stages(live: LiveFigures) -> None:
    """A stage that has never beaten is idle; where nothing works there is no bubble."""
    for stage in live.stage_figures(10):
        assert (stage.busy, stage.bubble, stage.received, stage.memory) == (0, 0, 0, 0)
    assert live.hop_figures() == ()
    assert live.tokens_per_second(3) == 0


def test_shares_of_the_last_seconds(live: LiveFigures, clock: Clock) -> None:
    """Busy is a share of the window; bubble one of the time in which any stage worked."""
    live.beat(Beat(0, 2.0, 2.0, 4, memory=64))
    live.beat(Beat(1, 2.0, 0.5, 4, received=3000))
    settle(clock)
    first, second = live.stage_figures(4.0)
    assert (first.busy, first.bubble, first.memory) == (0.5, 0.0, 64)
    assert (second.busy, second.bubble, second.received) == (0.125, 0.75, 750.0)
    assert (first.received_total, second.received_total) == (0, 3000)


def test_work_ends_by_time_alone(live: LiveFigures, clock: Clock) -> None:
    """A stage that beats no more is idle as soon as its last work has left the window."""
    live.beat(Beat(0, 0.5, 0.5, 1))
    settle(clock)
    assert live.stage_figures(1.0)[0].busy == 0.5
    clock.now += 1.0
    assert live.stage_figures(1.0)[0].busy == 0.0


def test_ranks_of_a_stage(live: LiveFigures, clock: Clock) -> None:
    """Bytes are those of all ranks; time is rank 0's, as they work in step."""
    for rank in range(2):
        live.beat(Beat(0, 2.0, 1.0, 4, memory=64, received=2000, rank=rank))
    live.beat(Beat(0, 2.0, 1.0, 4, memory=96, rank=1))
    settle(clock)
    figures = live.stage_figures(4.0)[0]
    assert (figures.busy, figures.memory, figures.received_total) == (0.25, 160, 4000)
    assert figures.received == 1000.0


def test_beats_of_ranks_out_of_phase(live: LiveFigures, clock: Clock) -> None:
    """What another rank beats before and after rank 0 is no time in which a stage worked."""
    for at, rank in enumerate((1, 0, 1)):
        live.beat(Beat(0, 2.0, 2.0, 4, received=2000, rank=rank))
        clock.now += 1.0 * (at < 2)
    settle(clock)
    figures = live.stage_figures(8.0)[0]
    assert (figures.busy, figures.bubble) == (0.25, 0.0)
    assert figures.received == 750.0


def test_a_stage_that_does_not_exist(live: LiveFigures) -> None:
    """A beat of no stage is not taken."""
    live.beat(Beat(2, 1.0, 1.0, 1, hops=(5.0,)))
    live.beat(Beat(-1, 1.0, 1.0, 1))
    assert live.hop_figures() == ()


def test_hops_between_neighbours(live: LiveFigures) -> None:
    """Quantiles are those of the messages that were measured, by neighbours."""
    live.beat(Beat(1, 1.0, 1.0, 1, hops=tuple(float(n) for n in range(1, 101))))
    live.hops(2, [7.0, -3.0])
    between, back = live.hop_figures()
    assert (between.source, between.target) == ("0", "1")
    assert between.quantiles == (50.0, 95.0, 99.0)
    assert (between.count, between.total, between.largest) == (100, 5050.0, 100.0)
    assert (back.source, back.target) == ("1", "engine")
    assert (back.count, back.total, back.largest) == (2, 7.0, 7.0)


def test_the_timeline_has_whole_seconds(live: LiveFigures, clock: Clock) -> None:
    """Each second has the share of it that was busy, and the tokens made in it."""
    clock.now = 1001.5
    live.beat(Beat(0, 1.0, 0.5, 1))  # from 1000.5 on
    live.tokens(3)
    live.tokens(4)
    clock.now = 1002.0 + LAG_SECONDS
    live.tokens(100)
    timeline = live.timeline(3)
    assert timeline.last == 1001
    assert timeline.busy == ((0.0, 0.25, 0.25), (0.0, 0.0, 0.0))
    assert timeline.tokens == (0, 0, 7)
    assert live.tokens_per_second(2) == 3.5
    assert live.generated == 107


def test_memory_is_bounded(live: LiveFigures, clock: Clock) -> None:
    """A week of work leaves no more than the last minutes behind."""
    for _ in range(20_000):
        clock.now += 0.5
        live.beat(Beat(0, 0.5, 0.4, 10, hops=(1.0,) * 64))
        live.tokens(5)
    assert len(live._stages[0].spans) <= 2 * (HISTORY_SECONDS + 3)
    assert len(live._tokens) <= HISTORY_SECONDS + 3
    assert len(live._hops[0].recent) == KEPT_HOPS
    shares = live.timeline().busy[0]
    assert len(shares) == HISTORY_SECONDS
    assert shares == pytest.approx([0.8] * HISTORY_SECONDS)


def test_a_beat_without_a_span(live: LiveFigures, clock: Clock) -> None:
    """Nonsense from another host neither fails nor counts."""
    live.beat(Beat(0, 0.0, 1.0, 1))
    live.beat(Beat(0, 1.0, 5.0, 1))
    settle(clock)
    assert live.stage_figures(2.0)[0].busy == 0.5
