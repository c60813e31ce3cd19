"""Cache budgets: what is reserved is what is checked, on all stages or on none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxcel.engine.kv_grid import coordinated_admission_with_attribution, grid_of
from mlxcel.engine.kv_manager import RejectionReason, StageKVManager
from mlxcel.family.caches import KVCacheKind, RotatingCacheKind, StateCacheKind
from mlxcel.partition.cache_bytes import cache_bytes

KIND = KVCacheKind(2, 16, 16)


def manager(budget: int | None, stage: int = 0, layers: int = 3) -> StageKVManager:
    return StageKVManager(stage, [KIND] * layers + [None], budget, itemsize=4, chunk=64)


def one(rows: int, longest: int) -> int:
    return cache_bytes(KIND, rows, longest, itemsize=4, chunk=64)


def test_bytes_are_those_of_the_pure_function() -> None:
    """A stage's figure is the sum of its layers' cache_bytes; a layer without a cache is free."""
    assert manager(None).bytes_of(2, 100) == 3 * one(2, 100)
    mixed = StageKVManager(0, [KIND, StateCacheKind(((10, 4),))], None, itemsize=2, chunk=64)
    kv = cache_bytes(KIND, 3, 7, itemsize=2, chunk=64)
    assert mixed.bytes_of(3, 7) == kv + 3 * 40


def test_a_refusal_carries_the_figures() -> None:
    """Who is refused learns the stage, the reason and the numbers, and nothing changes."""
    small = manager(3 * one(1, 100), stage=4)
    assert small.check(0, 1, 100) is None
    small.reserve(0, 1, 100)
    diagnostic = small.check(1, 1, 50)
    assert diagnostic is not None
    assert diagnostic.stage_index == 4
    assert diagnostic.reason is RejectionReason.MEMORY
    assert diagnostic.reason.metric_label() == "memory"
    assert diagnostic.used_memory_bytes == diagnostic.budget_bytes == 3 * one(1, 100)
    assert diagnostic.active_sequences == 1
    assert diagnostic.required_bytes == 3 * one(1, 50)
    assert (small.used, small.sequences) == (3 * one(1, 100), 1)


def test_a_growing_batch_pays_only_the_difference() -> None:
    """A batch that takes one more row is charged for what it grows by."""
    exact = manager(3 * one(2, 100))
    exact.reserve(0, 1, 60)
    assert exact.check(0, 2, 100) is None
    assert exact.check(0, 2, 101) is not None


def test_all_stages_or_none() -> None:
    """One stage's refusal leaves every stage as it was, and says which one it is."""
    managers = [manager(None, 0), manager(3 * one(1, 10), 1), manager(None, 2)]
    diagnostic = coordinated_admission_with_attribution(grid_of(managers), 0, 2, 10)
    assert diagnostic is not None
    assert diagnostic.stage_index == 1
    assert [m.used for m in managers] == [0, 0, 0]
    assert coordinated_admission_with_attribution(grid_of(managers), 0, 1, 10) is None
    assert all(m.used == 3 * one(1, 10) for m in managers)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 200)), max_size=30),
    st.integers(0, 400_000),
)
def test_reservations_never_exceed_the_budget(
    changes: list[tuple[int, int, int]], budget: int
) -> None:
    """Whatever is asked for, what has been accepted fits; giving all back leaves zero."""
    stage = manager(budget)
    for batch, rows, longest in changes:
        if stage.check(batch, rows, longest) is None:
            stage.reserve(batch, rows, longest)
        assert stage.used <= budget
    for batch in range(4):
        stage.reserve(batch, 0, 0)
    assert (stage.used, stage.sequences) == (0, 0)


def test_a_rotating_batch_keeps_the_columns_of_who_left() -> None:
    """A rotating cache stays as wide as the longest row it ever had; a full one does not."""
    rotating = StageKVManager(0, [RotatingCacheKind(2, 16, 16, 128)], None, itemsize=4, chunk=64)
    full = manager(None)
    for stage in (rotating, full):
        stage.reserve(0, 2, 100)
        stage.reserve(0, 1, 10)
    assert rotating.used == rotating.bytes_of(1, 100)
    assert full.used == full.bytes_of(1, 10)
    rotating.reserve(0, 0, 0)
    rotating.reserve(0, 1, 10)
    assert rotating.used == rotating.bytes_of(1, 10)
