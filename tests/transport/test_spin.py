"""When a receiver may poll."""

import pytest

from mlxcel.transport.spin import SPIN_SECONDS, spin_for


@pytest.mark.parametrize(
    ("stages", "cores", "spins"),
    [(1, 1, False), (1, 2, False), (2, 2, False), (1, 4, True), (4, 4, False), (4, 5, True)],
)
def test_nobody_spins_where_a_stage_would_miss_the_core(
    stages: int, cores: int, spins: bool
) -> None:
    """Polling needs more than two cores, and more cores than stages."""
    assert spin_for(stages, cores) == (SPIN_SECONDS if spins else 0.0)
