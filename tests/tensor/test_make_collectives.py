"""Which collectives a job gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxcel.errors import RankLost, UsageError
from mlxcel.pipeline.control import Job
from mlxcel.pipeline.group import RankGroup
from mlxcel.stage.contract import StageSpec
from mlxcel.tensor.make import make_collectives
from mlxcel.tensor.options import TensorParallel
from mlxcel.tensor.ring import RingCollectives


def job(rank: int | None, ranks: int = 2, **extra: Any) -> Job:
    spec = StageSpec(Path("none"), "none", 0, 1, 0, 1, tensor=TensorParallel(size=ranks), rank=rank)
    return Job(spec, 2, 5.0, 5.0, **extra)


def never(error: RankLost) -> None:
    raise AssertionError(error)


def test_a_worker_that_is_all_ranks_needs_none() -> None:
    """One graph adds up by itself."""
    assert make_collectives(job(None), None, never) is None
    assert make_collectives(job(None, 1), None, never) is None


def test_the_transport_carries_them_unless_told_otherwise() -> None:
    """The group's own connections."""
    group = RankGroup(0, 1, 2, {}, 5.0)
    made = make_collectives(job(1), group, never)
    assert isinstance(made, RingCollectives)
    assert (made.rank, made.size) == (1, 2)


def test_a_backend_that_is_not_there_is_refused_before_anybody_waits() -> None:
    """No other rank has to come for that."""
    group = RankGroup(0, 0, 2, {}, 5.0)
    with pytest.raises(UsageError, match="--tp-collectives carrier-pigeon"):
        make_collectives(job(0, collectives="carrier-pigeon"), group, never)
