"""Slots and steps that follow from what an operator allows."""

from __future__ import annotations

import pytest

from mlxcel.engine.limits import Limits, credits_for, slots_for


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("micro_batch", [None, 1, 4, 16])
def test_as_many_places_as_may_run(stages: int, batch: int, micro_batch: int | None) -> None:
    """Every sequence that may run at once has a place in a slot of the size asked for."""
    limits = Limits(30, batch, micro_batch)
    slots = slots_for(stages, limits)
    rows = min(batch, micro_batch or batch)
    assert slots >= stages
    assert slots * rows >= 30
    assert slots == stages or (slots - 1) * rows < 30, "no more slots than it takes"
    assert credits_for(stages, limits) > slots, "every slot may have its step in flight"


def test_slots_by_default() -> None:
    """Where the batch holds all that may run, there is one slot a stage."""
    assert [slots_for(stages, Limits()) for stages in (1, 2, 4)] == [1, 2, 4]
