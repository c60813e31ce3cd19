"""Stages against the memory that was declared for them."""

from __future__ import annotations

import pytest

from mlxcel.errors import MemoryBudgetError, PartitionError, UsageError
from mlxcel.family.contract import LayerAdjacencyGroup
from mlxcel.partition.memory import MemoryLimits, validate_partition
from mlxcel.partition.profile import LayerProfile, ModelProfile

PROFILE = ModelProfile(
    layers=(LayerProfile(100, 1, kv_bytes=10),) * 6,
    embedding_bytes=50,
    head_bytes=60,
    groups=(LayerAdjacencyGroup(3, 5, "they share a cache"),),
    shared_bytes=50,
)
HALVES = (range(3), range(3, 6))


def test_one_size_is_each_stages() -> None:
    """A single size is that of all stages, several are one per stage; a reserve comes off each."""
    assert MemoryLimits((80,)).budgets(3) == (80, 80, 80)
    assert MemoryLimits((80, 70, 60), reserve=10).budgets(3) == (70, 60, 50)


@pytest.mark.parametrize("sizes", [(80, 80), (80, 80, 80, 80), ()])
def test_as_many_sizes_as_stages(sizes: tuple[int, ...]) -> None:
    """Another number of sizes is refused with both counts."""
    with pytest.raises(UsageError, match=rf"--memory gives {len(sizes)} sizes for 3 stage"):
        MemoryLimits(sizes).budgets(3)


@pytest.mark.parametrize("size", [0, -1, 1 << 60])
def test_sizes_that_cannot_be(size: int) -> None:
    """No machine has nothing, less than that, or an exabyte."""
    with pytest.raises(UsageError, match=f"--memory of {size} bytes cannot be"):
        MemoryLimits((80, size)).budgets(2)


@pytest.mark.parametrize("reserve", [80, 100, -1])
def test_a_reserve_leaves_something(reserve: int) -> None:
    """A reserve as large as the memory is refused."""
    with pytest.raises(UsageError, match="--reserve"):
        MemoryLimits((90, 80), reserve).budgets(2)


def test_what_fits_is_accepted() -> None:
    """Weights, caches and the ends of the model may fill a budget to the last byte."""
    validate_partition(HALVES, PROFILE)
    validate_partition(HALVES, PROFILE, [None, None])
    validate_partition(HALVES, PROFILE, [380, 390])
    validate_partition([range(6)], PROFILE, [660 + 60])


def test_the_stage_that_lacks_the_most() -> None:
    """The error has the worst stage, what it holds, what it lacks, and where there is room."""
    with pytest.raises(MemoryBudgetError) as caught:
        validate_partition((range(1), range(1, 3), range(3, 6)), PROFILE, [500, 219, 380])
    error = caught.value
    assert (error.stage, error.device, error.layers) == (2, "local-stage-2", "3-5")
    assert (error.needed_bytes, error.kv_bytes, error.budget_bytes) == (390, 30, 380)
    assert error.short_bytes == 10
    assert not error.best
    assert error.exit_code == 1
    assert str(error) == (
        "stage 2 (local-stage-2) is 10 bytes short: layers 3-5 need 390 bytes (30 of them for KV "
        "caches), and there is room for 380. The most room is on stage 0 (local-stage-0): "
        "340 bytes."
    )


def test_without_room_anywhere() -> None:
    """Where every stage is full the error does not send anyone there."""
    with pytest.raises(MemoryBudgetError, match=r"No stage has room left"):
        validate_partition(HALVES, PROFILE, [380, 389])


@pytest.mark.parametrize(
    "ranges",
    [
        (range(3), range(4, 6)),
        (range(3), range(2, 6)),
        (range(3), range(3, 7)),
        (range(3, 6), range(3)),
        (range(3), range(3)),
        (range(0), range(6)),
        (range(5, 2, -1), range(3, 6)),
        (range(4), range(4, 6)),
    ],
)
def test_ranges_that_cannot_be(ranges: tuple[range, ...]) -> None:
    """Gaps, overlaps, reversed, empty and too long ranges, and a divided group, come first."""
    with pytest.raises(PartitionError):
        validate_partition(ranges, PROFILE, [1, 1])
