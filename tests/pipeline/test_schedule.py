"""The arithmetic of a pipeline."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.errors import UsageError
from mlxcel.pipeline.schedule import (
    Done,
    Flush,
    Forward,
    GPipeSchedule,
    Idle,
    Receive,
    circulating_bubble,
    suggested_micro_batch_size,
)

schedules = st.builds(GPipeSchedule, st.integers(1, 8), st.integers(1, 12))


def test_two_stages_two_micro_batches() -> None:
    """The smallest real schedule, event by event."""
    schedule = GPipeSchedule(2, 2)
    assert list(schedule.events(0)) == [Forward(0, 0), Forward(0, 1), Idle(), Done()]
    assert list(schedule.events(1)) == [
        Idle(),
        *(Receive(1, 0), Forward(1, 0), Flush(0)),
        *(Receive(1, 1), Forward(1, 1), Flush(1)),
        Done(),
    ]


@given(schedules)
def test_every_micro_batch_passes_every_stage_once_in_order(schedule: GPipeSchedule) -> None:
    """Each micro-batch is run by each stage exactly once, stage after stage, then flushed."""
    events = list(schedule)
    for micro_batch in range(schedule.micro_batches):
        path = [e for e in events if getattr(e, "micro_batch_id", None) == micro_batch]
        expected = [Forward(0, micro_batch)]
        for stage in range(1, schedule.stages):
            expected += [Receive(stage, micro_batch), Forward(stage, micro_batch)]
        assert path == [*expected, Flush(micro_batch)]


@given(schedules)
def test_a_stage_runs_one_forward_a_slot_in_order(schedule: GPipeSchedule) -> None:
    """A stage takes the micro-batches in order, one per time slot, else it idles."""
    for stage in range(schedule.stages):
        slots = [schedule.slot(stage, time) for time in range(schedule.slots)]
        forwards = [e.micro_batch_id for slot in slots for e in slot if isinstance(e, Forward)]
        assert forwards == list(range(schedule.micro_batches))
        for slot in slots:
            assert slot == (Idle(),) or sum(isinstance(e, Forward) for e in slot) == 1


@given(schedules)
def test_idle_slots_are_the_bubble(schedule: GPipeSchedule) -> None:
    """The share of idle slots is what the formula says, on every stage and in all."""
    k, m = schedule.stages, schedule.micro_batches
    for stage in range(k):
        idle = sum(isinstance(event, Idle) for event in schedule.events(stage))
        assert Fraction(idle, schedule.slots) == Fraction(k - 1, m + k - 1)
    assert schedule.bubble_fraction == (k - 1) / (m + k - 1)
    assert sum(isinstance(event, Idle) for event in schedule) == k * (k - 1)


@given(schedules)
def test_iterating_gives_the_events_of_all_stages_and_one_done(schedule: GPipeSchedule) -> None:
    """The whole schedule holds what the stages' own do, and ends with a single Done."""
    events = list(schedule)
    assert events[-1] == Done()
    assert Done() not in events[:-1]
    every = Counter(e for stage in range(schedule.stages) for e in schedule.events(stage))
    every[Done()] = 1
    assert Counter(events) == every


@pytest.mark.parametrize(
    ("stages", "micro_batches", "bubble"), [(4, 16, 3 / 19), (4, 32, 3 / 35), (1, 5, 0.0)]
)
def test_bubble_of_one_pass(stages: int, micro_batches: int, bubble: float) -> None:
    """(k-1)/(m+k-1), in numbers."""
    assert GPipeSchedule(stages, micro_batches).bubble_fraction == bubble


@pytest.mark.parametrize(
    ("stages", "micro_batches", "bubble"), [(4, 1, 0.75), (4, 3, 0.25), (4, 4, 0.0), (2, 9, 0.0)]
)
def test_bubble_of_circulating_micro_batches(
    stages: int, micro_batches: int, bubble: float
) -> None:
    """As many micro-batches as stages leave none idle."""
    assert circulating_bubble(stages, micro_batches) == bubble


@given(st.integers(1, 1000), st.integers(1, 64))
def test_the_suggested_size_makes_enough_micro_batches(batch: int, stages: int) -> None:
    """It is the smallest size that needs no more micro-batches than there are stages."""
    size = suggested_micro_batch_size(batch, stages)
    assert size * stages >= batch
    assert (size - 1) * stages < batch


@pytest.mark.parametrize("value", [0, -1])
def test_less_than_one_is_refused(value: int) -> None:
    """Neither stages nor micro-batches nor rows can be fewer than one."""
    for function in (GPipeSchedule, circulating_bubble, suggested_micro_batch_size):
        with pytest.raises(UsageError, match=f"{value} "):
            function(value, 1)
        with pytest.raises(UsageError, match=f"{value} stages|{value} micro-batches"):
            function(1, value)
