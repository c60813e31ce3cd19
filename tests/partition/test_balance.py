"""The automatic partition is the best there is, within the memory of each stage."""

from __future__ import annotations

from itertools import accumulate, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel.errors import MemoryBudgetError, PartitionError
from mlxcel.family.contract import LayerAdjacencyGroup
from mlxcel.partition.balance import BALANCES, BalanceBy, balance, layer_loads
from mlxcel.partition.memory import Budgets, validate_partition
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
    """Random profiles with caches and a few random groups; zero loads included."""
    load = st.integers(0, 30)
    layer = st.builds(LayerProfile, load, load, st.integers(0, 10))
    count = draw(st.integers(1, max_layers))
    layers = draw(st.lists(layer, min_size=count, max_size=count))
    spans = st.tuples(st.integers(0, count - 1), st.integers(1, 5) | st.integers(1, count))
    groups = [
        LayerAdjacencyGroup(start, min(start + length, count), "joined")
        for start, length in draw(st.lists(spans, max_size=3))
    ]
    end = st.integers(0, 60)
    tied = draw(st.integers(0, 60))
    return ModelProfile(
        tuple(layers),
        tied + draw(end),
        draw(end),
        tied + draw(end),
        draw(end),
        groups=tuple(groups),
        shared_bytes=tied,
    )


@st.composite
def tasks(draw: st.DrawFn, max_layers: int) -> tuple[ModelProfile, list[int | None]]:
    """Profiles with budgets of as many stages as there are pieces for, about what they need."""
    profile = draw(profiles(max_layers))
    pieces = len(legal_cuts(len(profile.layers), profile.groups)) + 1
    stages = draw(st.integers(1, min(16, pieces)))
    mean = memory(profile, range(len(profile.layers)), 1) // stages
    budget = st.none() | st.integers(0, 3 * mean + 60)
    return profile, draw(st.lists(budget, min_size=stages, max_size=stages))


def memory(profile: ModelProfile, layers: range, stages: int) -> int:
    """What a stage of these layers takes of its budget, as the definition says."""
    first, last = layers.start == 0, layers.stop == len(profile.layers)
    total = sum(profile.layers[i].bytes + profile.layers[i].kv_bytes for i in layers)
    total += profile.embedding_bytes * first + profile.head_bytes * last
    return total - profile.shared_bytes * (stages == 1)


def fitting(profile: ModelProfile, budgets: Budgets) -> list[list[range]]:
    """Every legal partition that breaks no budget, by trying all."""
    n, stages = len(profile.layers), len(budgets)
    every = (
        [range(a, b) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        for cuts in combinations(legal_cuts(n, profile.groups), stages - 1)
    )
    return [
        ranges
        for ranges in every
        if all(
            budget is None or memory(profile, layers, stages) <= budget
            for layers, budget in zip(ranges, budgets, strict=True)
        )
    ]


def rank(profile: ModelProfile, by: BalanceBy, ranges: list[range]) -> tuple[object, ...]:
    """How good a partition is by the documented rule; less is better."""
    loads = layer_loads(profile, by)
    stage_loads = [sum(loads[i] for i in layers) for layers in ranges]
    return max(stage_loads), -min(stage_loads), [len(layers) for layers in reversed(ranges)]


def lightest_maximum(profile: ModelProfile, by: BalanceBy, budgets: Budgets) -> int | None:
    """The load of the heaviest stage of the best partition that fits, or None if none does.

    Dynamic programming over (stages so far, layers so far): O(stages * layers ** 2).
    """
    n, stages = len(profile.layers), len(budgets)
    loads = [0, *accumulate(layer_loads(profile, by))]
    bounds = {0, *legal_cuts(n, profile.groups), n}
    best: dict[int, int] = {0: 0}
    for budget in budgets:
        following: dict[int, int] = {}
        for start, heaviest in best.items():
            for end in range(start + 1, n + 1):
                if end not in bounds:
                    continue
                if budget is not None and memory(profile, range(start, end), stages) > budget:
                    continue
                load = max(heaviest, loads[end] - loads[start])
                following[end] = min(load, following.get(end, load))
        best = following
    return best.get(n)


@given(tasks(max_layers=12), st.sampled_from(BALANCES))
@settings(max_examples=300, deadline=None)
def test_equals_exhaustive_search(
    task: tuple[ModelProfile, list[int | None]], by: BalanceBy
) -> None:
    """No partition that fits has a lighter heaviest stage; ties are broken as documented."""
    profile, budgets = task
    candidates = fitting(profile, budgets)
    if candidates:
        expected = min(candidates, key=lambda ranges: rank(profile, by, ranges))
        assert list(balance(profile, len(budgets), by, budgets)) == expected
    else:
        with pytest.raises(MemoryBudgetError):
            balance(profile, len(budgets), by, budgets)


@given(tasks(max_layers=10))
@settings(max_examples=200, deadline=None)
def test_the_shortfall_is_the_least_possible(task: tuple[ModelProfile, list[int | None]]) -> None:
    """Where nothing fits, the error is about a partition whose worst stage lacks the least."""
    profile, budgets = task
    if fitting(profile, budgets):
        return
    with pytest.raises(MemoryBudgetError) as caught:
        balance(profile, len(budgets), budgets=budgets)
    error = caught.value

    def more(by: int) -> list[int | None]:
        return [None if budget is None else budget + by for budget in budgets]

    assert fitting(profile, more(error.short_bytes))
    assert not fitting(profile, more(error.short_bytes - 1))
    assert error.budget_bytes == budgets[error.stage]
    assert error.best


@given(tasks(max_layers=128), st.sampled_from(BALANCES))
@settings(max_examples=150, deadline=None)
def test_every_answer_is_the_best_legal_partition(
    task: tuple[ModelProfile, list[int | None]], by: BalanceBy
) -> None:
    """Each layer once, no group divided, no budget broken, the optimum; refused iff impossible."""
    profile, budgets = task
    optimum = lightest_maximum(profile, by, budgets)
    if optimum is None:
        with pytest.raises(MemoryBudgetError):
            balance(profile, len(budgets), by, budgets)
        return
    ranges = balance(profile, len(budgets), by, budgets)
    assert len(ranges) == len(budgets)
    validate_partition(ranges, profile, budgets)
    loads = layer_loads(profile, by)
    assert max(sum(loads[i] for i in layers) for layers in ranges) == optimum


@given(profiles(max_layers=40), st.integers(1, 40))
@settings(deadline=None)
def test_refused_only_for_want_of_pieces(profile: ModelProfile, stages: int) -> None:
    """Without budgets, there is a partition wherever there are enough pieces."""
    pieces = len(legal_cuts(len(profile.layers), profile.groups)) + 1
    if stages > pieces:
        with pytest.raises(PartitionError):
            balance(profile, stages)
    else:
        validate_ranges(balance(profile, stages), len(profile.layers), profile.groups)


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


def test_prefill_makes_no_logits() -> None:
    """By time of a prompt's token, the head weighs nothing."""
    profile = ModelProfile(equal_layers(10).layers, head_bytes=1, head_work=400)
    assert sizes(balance(profile, 2, "time")) == [7, 3]
    assert sizes(balance(profile, 2, "time:prefill")) == [5, 5]


def test_memory_in_proportion_leaves_no_stage_empty() -> None:
    """With 97.5, 1.25 and 1.25 % of the memory, the small nodes hold a layer each, or none can."""
    profile, shares = equal_layers(20), (97.5, 1.25, 1.25)
    roomy = [int(8000 * share / 100) for share in shares]
    assert sizes(balance(profile, 3, budgets=roomy)) == [18, 1, 1]
    tight = [int(7999 * share / 100) for share in shares]
    with pytest.raises(MemoryBudgetError) as caught:
        balance(profile, 3, budgets=tight)
    assert (caught.value.short_bytes, caught.value.stage) == (1, 1)


@pytest.mark.parametrize("small", range(3))
def test_the_leftover_layer_goes_where_there_is_room(small: int) -> None:
    """7 layers on 3 nodes, one with room for exactly 2: the others share the rest."""
    budgets = [200 if stage == small else 300 for stage in range(3)]
    expected = [2, 3, 2] if small == 0 else [3, 2, 2]
    assert sizes(balance(equal_layers(7), 3, budgets=budgets)) == expected
    budgets = [200 if stage == small else 249 for stage in range(3)]
    with pytest.raises(MemoryBudgetError) as caught:
        balance(equal_layers(7), 3, budgets=budgets)
    assert caught.value.short_bytes == 51
    assert caught.value.stage != small


def test_one_layer_stages_at_the_ends() -> None:
    """The first or the last node may have room for one layer and its end of the model only."""
    profile = ModelProfile(equal_layers(10).layers, embedding_bytes=50, head_bytes=50)
    assert sizes(balance(profile, 3, budgets=[150, None, None])) == [1, 5, 4]
    assert sizes(balance(profile, 3, budgets=[None, None, 150])) == [4, 5, 1]
    assert sizes(balance(profile, 3, budgets=[150, 900, 150])) == [1, 8, 1]


def test_caches_count_against_the_budget_only() -> None:
    """KV caches move a cut where they would not fit, and are no load otherwise."""
    layers = (*[LayerProfile(100, 1, kv_bytes=100)] * 4, *[LayerProfile(100, 1)] * 4)
    assert sizes(balance(ModelProfile(layers), 2)) == [4, 4]
    assert sizes(balance(ModelProfile(layers), 2, budgets=[600, 1000])) == [3, 5]


def test_a_tied_table_is_held_once_by_one_stage() -> None:
    """On one stage embedding and head are the same bytes."""
    profile = ModelProfile(
        equal_layers(2).layers, embedding_bytes=50, head_bytes=60, shared_bytes=50
    )
    assert sizes(balance(profile, 1, budgets=[260])) == [2]
    with pytest.raises(MemoryBudgetError) as caught:
        balance(profile, 1, budgets=[259])
    assert caught.value.short_bytes == 1


def test_budgets_are_as_many_as_the_stages() -> None:
    """Another number of budgets is a mistake of the caller."""
    with pytest.raises(ValueError, match="zip"):
        balance(equal_layers(4), 2, budgets=[100])


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
