"""Cache memory on stages and ranks: all workers take a sequence, or none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.engine.kv_grid import (
    Admitted,
    CacheAdmissionRequest,
    Grid,
    PpTpCoord,
    Rejected,
    broadcast_2d_eviction,
    coordinated_2d_admission,
    coordinated_admission_with_attribution,
    grid_of,
    stage_uses,
)
from mlxcel.engine.kv_manager import RejectionReason, StageKVManager
from mlxcel.family.caches import CacheKind, KVCacheKind, RotatingCacheKind, StateCacheKind

KIND = KVCacheKind(2, 16, 16)
KINDS: list[CacheKind] = [KIND, RotatingCacheKind(1, 8, 8, 64), StateCacheKind(((100, 4),))]


def manager(
    budget: int | None, stage: int = 0, rank: int | None = None, kind: CacheKind = KIND
) -> StageKVManager:
    return StageKVManager(stage, [kind] * 3, budget, itemsize=4, chunk=64, rank=rank)


def figures(grid: Grid) -> dict[PpTpCoord, tuple[int, int]]:
    """All that may be seen of what is reserved."""
    return {at: (one.used, one.sequences) for at, one in grid.items()}


def test_coordinates_are_what_errors_say() -> None:
    """A place is a stage, or a rank of one, in the order of the workers."""
    grid = grid_of([manager(None, 0), manager(None, 1, 0), manager(None, 1, 1)])
    assert list(grid) == [PpTpCoord(0), PpTpCoord(1, 0), PpTpCoord(1, 1)]
    assert [str(at) for at in grid] == ["stage 0", "rank 0 of stage 1", "rank 1 of stage 1"]


def test_a_refusal_names_stage_and_rank() -> None:
    """The first worker that refuses is named with its figures, in words too."""
    small = manager(None).bytes_of(1, 10)
    grid = grid_of(
        [manager(None, 0, 0), manager(None, 0, 1), manager(small, 1, 0), manager(0, 1, 1)]
    )
    answer = coordinated_2d_admission(grid, CacheAdmissionRequest(7, 11))
    assert isinstance(answer, Rejected)
    assert (answer.at, answer.reason) == (PpTpCoord(1, 0), RejectionReason.MEMORY)
    assert (answer.diagnostic.stage_index, answer.diagnostic.rank) == (1, 0)
    assert str(answer.diagnostic).startswith("rank 0 of stage 1 has 0 sequences in 0 of ")
    whole = grid_of([manager(0, 3)])
    diagnostic = coordinated_admission_with_attribution(whole, 0, 1, 1)
    assert str(diagnostic).startswith("stage 3 has 0 sequences in 0 of 0 bytes")


def test_eviction_reaches_every_worker() -> None:
    """What a sequence held is given back everywhere, and nothing else is."""
    grid = grid_of([manager(None, stage, rank) for stage in range(2) for rank in range(2)])
    assert coordinated_2d_admission(grid, CacheAdmissionRequest(1, 10)) == Admitted()
    one = figures(grid)
    assert coordinated_2d_admission(grid, CacheAdmissionRequest(2, 20, rows=3)) == Admitted()
    broadcast_2d_eviction(grid, 2)
    assert figures(grid) == one
    broadcast_2d_eviction(grid, 1)
    assert set(figures(grid).values()) == {(0, 0)}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 2), st.sampled_from(KINDS),
            st.none() | st.integers(0, 400_000),
        ),
        min_size=1, max_size=9,
    ),
    st.lists(
        st.builds(
            CacheAdmissionRequest, st.integers(0, 3), st.integers(1, 300), rows=st.integers(1, 4)
        )
        | st.integers(0, 3),
        max_size=20,
    ),
)  # fmt: skip
def test_all_workers_or_none(
    workers: list[tuple[int, int, CacheKind, int | None]],
    happenings: list[CacheAdmissionRequest | int],
) -> None:
    """On any grid, whatever comes: a refusal changes nothing anywhere, and budgets hold."""
    grid = grid_of(manager(budget, stage, rank, kind) for stage, rank, kind, budget in workers)
    for event in happenings:
        before = figures(grid)
        if isinstance(event, int):
            broadcast_2d_eviction(grid, event)
            continue
        asked = (event.seq_id, event.rows, event.prompt_len)
        refusals = [at for at, one in grid.items() if one.check(*asked) is not None]
        answer = coordinated_2d_admission(grid, event)
        if isinstance(answer, Rejected):
            assert answer.at == refusals[0]
            assert figures(grid) == before
        else:
            assert refusals == []
            assert coordinated_2d_admission(grid, event) == Admitted()  # what it holds counts
        for one in grid.values():
            assert one.budget is None or one.used <= one.budget
    for seq_id in range(4):
        broadcast_2d_eviction(grid, seq_id)
    assert set(figures(grid).values()) == {(0, 0)}


@pytest.mark.parametrize(
    ("budgets", "shown"),
    [
        ([200_000, 20_000], 20_000),
        ([20_000, None], 20_000),
        ([None, None], None),
        ([5_000_000, 0], 0),
    ],
)
def test_a_stage_is_as_tight_as_its_tightest_rank(
    budgets: list[int | None], shown: int | None
) -> None:
    """The figures of a stage are those of the rank with the least room; the others hold no more."""
    managers = [manager(None, 0), *(manager(b, 1, rank) for rank, b in enumerate(budgets))]
    uses = stage_uses(managers)
    assert list(uses) == [0, 1]
    assert (uses[0].budget, uses[0].used) == (None, 0)
    assert (uses[1].budget, uses[1].used) == (shown, 0)
    for one in managers:
        one.reserve(0, 2, 30)
    assert uses[1].budget == shown
    assert uses[1].used == uses[0].used > 0


def test_the_tightest_rank_may_change() -> None:
    """The rank whose caches are the fullest is shown, whatever its budget is."""
    large, small = manager(400_000, 0, 0), manager(100_000, 0, 1)
    use = stage_uses([large, small])[0]
    assert use.tightest is small
    large.reserve(0, 8, 64)
    assert use.tightest is large
    assert (use.used, use.budget) == (large.used, 400_000)
