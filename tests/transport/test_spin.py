"""When a receiver may poll."""

import pytest

from mlxcel.transport.spin import RANK_SPIN_SECONDS, SPIN_SECONDS, spin_for


@pytest.mark.parametrize(
    ("stages", "cores", "spins"),
    [(1, 1, False), (1, 2, False), (2, 2, False), (1, 4, True), (4, 4, False), (4, 5, True)],
)
def test_nobody_spins_where_a_stage_would_miss_the_core(
    stages: int, cores: int, spins: bool
) -> None:
    """Polling needs more than two cores, and more cores than stages."""
    assert spin_for(stages, cores) == (SPIN_SECONDS if spins else 0.0)


@pytest.mark.parametrize(("ranks", "cores", "spins"), [(2, 2, True), (4, 4, True), (4, 2, False)])
def test_ranks_spin_where_each_has_a_core(ranks: int, cores: int, spins: bool) -> None:
    """Ranks wait for each other in every layer: what polls has nothing to compute."""
    assert spin_for(ranks, cores, "tp_collective") == (RANK_SPIN_SECONDS if spins else 0.0)
