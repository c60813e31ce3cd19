"""Which stage holds what."""

import pytest

from mlxcel.partition.assignment import StageAssignment, assign
from mlxcel.partition.profile import LayerProfile, ModelProfile

PROFILE = ModelProfile(
    layers=tuple(LayerProfile(bytes=10 * i, work=1) for i in range(1, 5)),
    embedding_bytes=1000,
    head_bytes=500,
)


def test_ends_belong_to_the_first_and_last_stage() -> None:
    """First = embedding + layers, middle = layers, last = head + layers."""
    assert assign(PROFILE, (range(1), range(1, 3), range(3, 4))) == (
        StageAssignment(0, "local-stage-0", range(1), True, False, 1010),
        StageAssignment(1, "local-stage-1", range(1, 3), False, False, 50),
        StageAssignment(2, "local-stage-2", range(3, 4), False, True, 540),
    )


def test_one_stage_holds_everything() -> None:
    """A single stage embeds and has the head."""
    (stage,) = assign(PROFILE, (range(4),))
    assert (stage.has_embedding, stage.has_lm_head) == (True, True)
    assert stage.estimated_memory_bytes == 1600


def test_one_stage_holds_a_tied_table_once() -> None:
    """What is counted at both ends because it is tied is counted once where they meet."""
    tied = ModelProfile(PROFILE.layers, 1000, 0, 1200, 0, shared_bytes=1000)
    (stage,) = assign(tied, (range(4),))
    assert stage.estimated_memory_bytes == 100 + 1000 + 200
    first, last = assign(tied, (range(2), range(2, 4)))
    assert first.estimated_memory_bytes + last.estimated_memory_bytes == 100 + 1000 + 1200


def test_caches_are_counted_apart() -> None:
    """A stage has the caches of its layers, beside its weights."""
    profile = PROFILE.with_caches([1, 2, 3, 4])
    first, last = assign(profile, (range(1), range(1, 4)))
    assert (first.kv_bytes, last.kv_bytes) == (1, 9)
    assert (first.estimated_memory_bytes, first.total_bytes) == (1010, 1011)


def test_devices_may_be_named() -> None:
    """Given device ids are used, and must be as many as stages."""
    ranges = (range(2), range(2, 4))
    assert [s.device_id for s in assign(PROFILE, ranges, ["a", "b"])] == ["a", "b"]
    with pytest.raises(ValueError, match="zip"):
        assign(PROFILE, ranges, ["a"])
