"""The automatic partition is the best there is."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel.errors import PartitionError
from mlxcel.family.contract import LayerAdjacencyGroup
from mlxcel.partition.balance import balance, layer_loads
from mlxcel.partition.profile import LayerProfile, ModelProfile
from mlxcel.partition.ranges import legal_cuts, validate_ranges


def equal_layers(count: int) -> ModelProfile:
    """Layers of 100 bytes, and nothing else."""
    return ModelProfile(layers=(LayerProfile(100, 100),) * count)


def sizes(ranges: tuple[range, ...]) -> list[int]:
    """How many layers each stage has."""
    return [len(layers) for layers in ranges]


@st.composite
def profiles(draw: st.DrawFn, max_layers: int) -> ModelProfile:
    """Random profiles with a few random groups; zero loads included."""
    load = st.integers(0, 30)
    layers = draw(st.lists(st.builds(LayerProfile, load, load), min_size=1, max_size=max_layers))
    starts = draw(st.lists(st.integers(0, len(layers) - 1), max_size=3))
    groups = [
        LayerAdjacencyGroup(a, draw(st.integers(a + 1, len(layers))), "joined") for a in starts
    ]
    end = st.integers(0, 60)
    return ModelProfile(
        tuple(layers), draw(end), draw(end), draw(end), draw(end), groups=tuple(groups)
    )


def best(profile: ModelProfile, stages: int, by: str) -> list[range]:
    """The partition that the documented rule takes, by trying all."""

    def rank(ranges: list[range]) -> tuple[object, ...]:
        loads = layer_loads(profile, by)
        stage_loads = [sum(loads[i] for i in layers) for layers in ranges]
        return max(stage_loads), -min(stage_loads), [len(layers) for layers in reversed(ranges)]

    n = len(profile.layers)
    every = (
        [range(a, b) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        for cuts in combinations(legal_cuts(n, profile.groups), stages - 1)
    )
    return min(every, key=rank)


@given(profiles(max_layers=12), st.integers(1, 6), st.sampled_from(["bytes", "time"]))
@settings(max_examples=300, deadline=None)
def test_equals_exhaustive_search(profile: ModelProfile, stages: int, by: str) -> None:
    """No partition has a lighter heaviest stage, and ties are broken as documented."""
    pieces = len(legal_cuts(len(profile.layers), profile.groups)) + 1
    if stages > pieces:
        with pytest.raises(PartitionError):
            balance(profile, stages, by)
    else:
        assert list(balance(profile, stages, by)) == best(profile, stages, by)


@given(profiles(max_layers=40), st.integers(1, 40), st.sampled_from(["bytes", "time"]))
@settings(deadline=None)
def test_every_answer_is_a_legal_partition(profile: ModelProfile, stages: int, by: str) -> None:
    """Every layer stands exactly once, no stage is empty, no group is divided."""
    try:
        ranges = balance(profile, stages, by)
    except PartitionError:
        assert stages > len(legal_cuts(len(profile.layers), profile.groups)) + 1
        return
    assert len(ranges) == stages
    validate_ranges(ranges, len(profile.layers), profile.groups)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(10, 3, [4, 3, 3]), (3, 2, [2, 1]), (61, 2, [31, 30]), (7, 7, [1] * 7), (5, 1, [5])],
)
def test_equal_layers_divide_evenly(layers: int, stages: int, expected: list[int]) -> None:
    """Without anything at the ends, stages differ by one layer at most, long ones first."""
    assert sizes(balance(equal_layers(layers), stages)) == expected


def test_60_layers_on_31_stages_leave_none_empty() -> None:
    """Where most stages have two layers, two have one."""
    assert sorted(sizes(balance(equal_layers(60), 31))) == [1, 1, *[2] * 29]


def test_the_ends_weigh_in() -> None:
    """A stage with a heavy embedding or head gets fewer layers, but at least one."""
    layers = equal_layers(20).layers
    heavy = ModelProfile(layers, embedding_bytes=600, head_bytes=300)
    assert sizes(balance(heavy, 3)) == [4, 10, 6]
    huge = ModelProfile(layers, embedding_bytes=100_000, head_bytes=100_000)
    assert sizes(balance(huge, 3)) == [1, 18, 1]


def test_time_and_bytes_differ() -> None:
    """By time, an embedding of which a token reads one row costs almost nothing."""
    profile = ModelProfile(equal_layers(10).layers, embedding_bytes=400, embedding_work=1)
    assert sizes(balance(profile, 2, "bytes")) == [3, 7]
    assert sizes(balance(profile, 2, "time")) == [5, 5]


def test_a_group_keeps_its_layers_together() -> None:
    """A group forces the cut to its edge, even if that is uneven."""
    group = LayerAdjacencyGroup(2, 8, "shared cache")
    assert sizes(balance(ModelProfile(equal_layers(8).layers, groups=(group,)), 2)) == [2, 6]


@pytest.mark.parametrize("stages", [0, -1])
def test_no_stage_is_refused(stages: int) -> None:
    """A model needs a stage to run on."""
    with pytest.raises(PartitionError, match=f"{stages} stages"):
        balance(equal_layers(4), stages)


def test_more_stages_than_layers_are_refused() -> None:
    """2 layers on 4 stages: the error says how many are possible."""
    with pytest.raises(PartitionError, match=r"4 stages.* 2 layers.* at most 2"):
        balance(equal_layers(2), 4)


def test_more_stages_than_pieces_name_the_group() -> None:
    """Where a group is the reason, the error names its layers and why they belong together."""
    groups = (LayerAdjacencyGroup(1, 3, "small"), LayerAdjacencyGroup(2, 6, "shared cache"))
    profile = ModelProfile(equal_layers(6).layers, groups=groups)
    with pytest.raises(PartitionError, match=r"2 pieces.* layers 2-5 .*shared cache.* at most 2"):
        balance(profile, 3)


def test_large_models_are_no_problem() -> None:
    """1000 layers of terabytes on 64 stages stay exact; the heaviest stage is near the mean."""
    layers = tuple(LayerProfile(10**9 + 7919 * i % 10**9, 1) for i in range(1000))
    ranges = balance(ModelProfile(layers), 64)
    validate_ranges(ranges, 1000)
    heaviest = max(sum(layers[i].bytes for i in stage) for stage in ranges)
    mean = sum(layer.bytes for layer in layers) / 64
    assert heaviest - mean < 2 * 10**9
