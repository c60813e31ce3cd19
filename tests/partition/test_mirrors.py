"""Stages that mirror caches of earlier ones: which, and what room they take."""

from __future__ import annotations

import pytest

from mlxcel.errors import MemoryBudgetError, PartitionError
from mlxcel.family import LayerAdjacencyGroup
from mlxcel.partition.assignment import assign
from mlxcel.partition.balance import balance
from mlxcel.partition.memory import validate_partition
from mlxcel.partition.profile import LayerProfile, ModelProfile

# Layers 3 to 5 read what layers 1 and 2 keep: 1 by 3 and 5, 2 by 4.
GROUPS = tuple(
    LayerAdjacencyGroup(s, e + 1, "shares", mirrorable=True) for s, e in [(1, 3), (2, 4), (1, 5)]
)
ONE_EACH = tuple(range(layer, layer + 1) for layer in range(6))


def profile(*kv: int) -> ModelProfile:
    layers = tuple(LayerProfile(100, 1, size) for size in kv)
    return ModelProfile(layers, groups=GROUPS)


def test_only_where_they_are_allowed() -> None:
    """By default the groups stay together; with mirrors they may be divided."""
    plain = profile(10, 20, 30, 0, 0, 0)
    with pytest.raises(PartitionError, match="--allow-mirrored-kv"):
        validate_partition(ONE_EACH, plain)
    validate_partition(ONE_EACH, plain.with_mirrors())
    other = LayerAdjacencyGroup(0, 2, "must not part")
    kept = ModelProfile(plain.layers, groups=(*GROUPS, other)).with_mirrors()
    assert kept.groups == (other,)


@pytest.mark.parametrize(
    ("layers", "mirrors"),
    [
        (range(0, 6), ()),
        (range(0, 2), ()),
        (range(2, 6), (1,)),
        (range(3, 6), (1, 2)),
        (range(4, 5), (2,)),
        (range(4, 6), (1, 2)),
        (range(5, 6), (1,)),
    ],
)
def test_what_a_stage_mirrors(layers: range, mirrors: tuple[int, ...]) -> None:
    """Each source before it that one of its layers reads, once."""
    assert profile(10, 20, 30, 0, 0, 0).with_mirrors().mirrored(layers) == mirrors


def test_mirrors_count_as_caches() -> None:
    """A stage's caches are its layers' and its mirrors'."""
    stages = assign(profile(10, 20, 30, 0, 0, 0).with_mirrors(), ONE_EACH)
    assert [stage.kv_bytes for stage in stages] == [10, 20, 30, 20, 30, 20]


def test_budgets_leave_room_for_mirrors() -> None:
    """The balancer's stages fit with their mirrors, and what cannot fit is said to lack them."""
    mirrored = profile(10, 20, 30, 0, 0, 0).with_mirrors()
    budgets = (360, 350)
    ranges = balance(mirrored, 2, budgets=budgets)
    validate_partition(ranges, mirrored, budgets)
    with pytest.raises(MemoryBudgetError):
        balance(mirrored, 2, budgets=(360, 310))


def test_only_the_mirrors_that_are_needed() -> None:
    """A stage that fits with the mirrors it needs is not refused for those it does not."""
    mirrored = profile(10, 20, 30, 0, 0, 0).with_mirrors()
    budgets = (600, 120)
    ranges = balance(mirrored, 2, budgets=budgets)
    assert ranges == (range(0, 5), range(5, 6))
