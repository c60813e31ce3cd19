"""When a stage beats and what it says, by a clock that the test sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.pipeline.pulse import Meter
from mlxcel.pipeline.report import Beat


def test_a_meter_is_quiet_until_work_comes() -> None:
    """Idle time before the first step belongs to no beat."""
    meter = Meter(3)
    assert meter.quiet
    meter.begin(100.0)
    assert not meter.quiet
    meter.end(100.25, 4096)
    assert meter.beat(100.5) == Beat(3, 0.5, 0.25, 1, memory=4096)


def test_the_beat_after_the_last_work_is_the_last() -> None:
    """A stage that has stopped says so once, and is quiet then."""
    meter = Meter(0)
    meter.begin(0.0)
    meter.end(0.5, 1)
    meter.beat(0.5)
    assert not meter.quiet
    assert meter.beat(1.0) == Beat(0, 0.5, 0.0, 0, memory=1)
    assert meter.quiet


def test_a_step_is_told_in_parts() -> None:
    """A step longer than a beat counts as busy in each, and as a step in the last."""
    meter = Meter(0)
    meter.begin(0.0)
    assert meter.beat(0.5) == Beat(0, 0.5, 0.5, 0)
    assert meter.beat(1.0) == Beat(0, 0.5, 0.5, 0)
    meter.end(1.25, 0)
    assert meter.beat(1.5) == Beat(0, 0.5, 0.25, 1)


@given(st.lists(st.tuples(st.floats(0.01, 5), st.floats(0.01, 5), st.booleans()), max_size=30))
def test_nothing_is_told_twice_or_never(steps: list[tuple[float, float, bool]]) -> None:
    """Whenever it beats, all busy time and all steps are told exactly once."""
    meter, now, busy, beats = Meter(0), 0.0, 0.0, []
    for length, pause, during in steps:
        meter.begin(now)
        if during:
            beats.append(meter.beat(now + length / 2))
        now += length
        busy += length
        meter.end(now, 0)
        if during:
            beats.append(meter.beat(now))
        now += pause
    if not meter.quiet:
        beats.append(meter.beat(now))
    assert sum(beat.steps for beat in beats) == len(steps)
    assert sum(beat.busy for beat in beats) == pytest.approx(busy)
    assert all(beat.busy <= beat.span + 1e-9 for beat in beats)
