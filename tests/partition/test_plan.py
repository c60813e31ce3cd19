"""From a checkpoint and the flags to stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.errors import MemoryBudgetError, PartitionError
from mlxcel.family import Family
from mlxcel.hookspecs import hookimpl
from mlxcel.partition.balance import BALANCES, balance
from mlxcel.partition.cache_bytes import Workload
from mlxcel.partition.memory import MemoryLimits
from mlxcel.partition.plan import Plan, make_plan
from mlxcel.partition.profile import ModelProfile
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import TensorParallel

Make = Callable[..., Plan]


class Placer:
    """A plugin that places stages as it was told to."""

    def __init__(self, answer: tuple[range, ...] | None) -> None:
        self.answer = answer
        self.asked: list[tuple[ModelProfile, int, str, Any]] = []

    @hookimpl
    def mlxcel_place_stages(
        self, profile: ModelProfile, stages: int, balance: str, budgets: Any
    ) -> tuple[range, ...] | None:
        self.asked.append((profile, stages, balance, budgets))
        return self.answer


@pytest.fixture
def make(tiny: Callable[..., Path], family_of: Callable[[Path], Family]) -> Make:
    def call(name: str = "llama", placer: Placer | None = None, **options: Any) -> Plan:
        plugins = Plugins([])
        if placer is not None:
            plugins.register_default(placer)
        family = family_of(tiny(name))
        checkpoint = family.open(tiny(name))
        return make_plan(checkpoint, family, DtypeChoice(None, ""), plugins, **options)

    return call


def ranges(plan: Plan) -> list[range]:
    return [stage.layer_range for stage in plan.stages]


def test_one_stage_by_default(make: Make) -> None:
    """Without any flag the whole model is one stage."""
    assert ranges(make()) == [range(6)]


@pytest.mark.parametrize("by", BALANCES)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_size(make: Make, size: int, by: Any) -> None:
    """A number of stages goes to the balancer."""
    plan = make(size=size, by=by)
    assert ranges(plan) == list(balance(plan.profile, size, by))
    assert len(plan.stages) == size


def test_layers(make: Make) -> None:
    """Ranges are taken as they are and imply the number of stages."""
    expected = [range(1), range(1, 5), range(5, 6)]
    assert ranges(make(layers="0,1-4,5")) == expected
    assert ranges(make(layers="0,1-4,5", size=3)) == expected


def test_the_ends(make: Make) -> None:
    """The first stage has the embedding, the last one the head, and bytes add up."""
    whole, split = make(), make(size=3)
    assert [stage.has_embedding for stage in split.stages] == [True, False, False]
    assert [stage.has_lm_head for stage in split.stages] == [False, False, True]
    total = sum(stage.estimated_memory_bytes for stage in split.stages)
    assert total == whole.stages[0].estimated_memory_bytes


@pytest.mark.parametrize("size", [1, 2, 4])
def test_size_and_layers_disagree(make: Make, size: int) -> None:
    """Two flags that say different things are refused, naming both."""
    with pytest.raises(PartitionError, match=f"--pp-size {size} .* 3 ranges of --pp-layers"):
        make(size=size, layers="0,1-4,5")


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0},
        {"size": 7},
        {"layers": "0-3"},
        {"layers": "0-3,3-5"},
        {"layers": "0-3,4-6"},
        {"layers": "0-3,5"},
        {"layers": "3-5,0-2"},
        {"layers": "x"},
    ],
)
def test_impossible_stages(make: Make, options: dict[str, Any]) -> None:
    """What does not tile the layers is refused."""
    with pytest.raises(PartitionError):
        make(**options)


def test_an_adjacency_group_is_not_cut(make: Make) -> None:
    """By hand it is refused with source and consumer; the balancer does not try."""
    with pytest.raises(PartitionError, match="source layer 3 and consumer layer 5"):
        make("gemma4", layers="0-4,5-7")
    assert ranges(make("gemma4", size=3)) == [range(1), range(1, 2), range(2, 8)]
    with pytest.raises(PartitionError, match="at most 3 stages"):
        make("gemma4", size=4)


def test_a_plugin_places_the_stages(make: Make) -> None:
    """The hook is asked with profile, count, balance and budgets, and its answer is taken."""
    placer = Placer((range(5), range(5, 6)))
    plan = make(placer=placer, size=2, by="time")
    assert ranges(plan) == [range(5), range(5, 6)]
    plan = make(placer=placer, size=2, limits=MemoryLimits((10**9,), reserve=1))
    assert placer.asked == [
        (plan.profile, 2, "time", None),
        (plan.profile, 2, "bytes", (10**9 - 1, 10**9 - 1)),
    ]


def test_a_plugin_may_leave_it_to_others(make: Make) -> None:
    """Without an answer of the hook the balancer decides."""
    placer = Placer(None)
    assert ranges(make(placer=placer, size=2)) == ranges(make(size=2))
    assert len(placer.asked) == 1


def test_ranges_by_hand_are_not_the_plugins_business(make: Make) -> None:
    """--pp-layers wins over every plugin."""
    placer = Placer((range(5), range(5, 6)))
    assert ranges(make(placer=placer, layers="0,1-5")) == [range(1), range(1, 6)]
    assert placer.asked == []


@pytest.mark.parametrize(
    "answer",
    [(), (range(6),), (range(3), range(3, 5)), (range(3), range(2, 6)), (range(0), range(6))],
)
def test_a_plugins_answer_is_checked(make: Make, answer: tuple[range, ...]) -> None:
    """An answer that does not tile the layers, or in another number of stages, is refused."""
    with pytest.raises(PartitionError):
        make(placer=Placer(answer), size=2)


def test_a_plugin_cannot_cut_a_group(make: Make) -> None:
    """Nor may the answer divide layers that must share a stage."""
    with pytest.raises(PartitionError, match="source layer"):
        make("gemma4", placer=Placer((range(5), range(5, 8))), size=2)


def test_a_plugin_keeps_to_the_memory(make: Make) -> None:
    """An answer that breaks a budget is refused like ranges by hand."""
    placer = Placer((range(5), range(5, 6)))
    first, _ = make(placer=placer, size=2).stages
    limits = MemoryLimits((first.total_bytes - 1, 10**9))
    with pytest.raises(MemoryBudgetError, match=r"stage 0 .* is 1 bytes short"):
        make(placer=placer, size=2, limits=limits)


def test_caches_take_memory(make: Make) -> None:
    """The caches of a workload are in the profile and count against the limits."""
    whole = make()
    size = whole.stages[0].total_bytes
    make(limits=MemoryLimits((size,)))
    with pytest.raises(MemoryBudgetError, match="shorter --context") as caught:
        make(limits=MemoryLimits((size,)), workload=Workload(context=10, sequences=2))
    assert caught.value.short_bytes == caught.value.kv_bytes
    plan = make(workload=Workload(context=10, sequences=2))
    assert plan.stages[0].kv_bytes == caught.value.kv_bytes
    assert all(layer.kv_bytes for layer in plan.profile.layers)


def test_more_ranks_that_are_enough_are_named(make: Make) -> None:
    """Where ranks have memory of their own, the fewest of them that fit are; and they do fit."""
    share = make(size=2, tensor=TensorParallel(2), apart=True).stages
    limits = MemoryLimits((max(stage.total_bytes for stage in share),))
    with pytest.raises(MemoryBudgetError, match=r"or 2 ranks a stage \(--tp-size 2\)"):
        make(size=2, limits=limits, apart=True)
    make(size=2, limits=limits, tensor=TensorParallel(2), apart=True)


def test_more_ranks_that_are_enough_for_given_ranges(make: Make) -> None:
    """With --pp-layers it is these ranges that have to fit."""
    limits = MemoryLimits((500_000,))
    for layers, ranks in (("0-2,3-5", 2), ("0-0,1-5", 4)):
        with pytest.raises(MemoryBudgetError, match=rf"\(--tp-size {ranks}\)"):
            make(layers=layers, limits=limits, apart=True)
        make(layers=layers, limits=limits, tensor=TensorParallel(ranks), apart=True)


def test_more_ranks_than_there_are(make: Make) -> None:
    """Only numbers above the one that was asked for are tried."""
    share = make(size=2, tensor=TensorParallel(4), apart=True).stages
    limits = MemoryLimits((max(stage.total_bytes for stage in share),))
    with pytest.raises(MemoryBudgetError, match=r"--tp-size 4"):
        make(size=2, limits=limits, tensor=TensorParallel(2), apart=True)


@pytest.mark.parametrize("options", [{}, {"tensor": TensorParallel(2)}])
def test_ranks_of_one_process_do_not_help(make: Make, options: dict[str, Any]) -> None:
    """They share its memory, so no number of them is offered."""
    with pytest.raises(MemoryBudgetError) as caught:
        make(size=2, limits=MemoryLimits((600_000,)), **options)
    assert "--tp-size" not in str(caught.value)
    assert "quantized weights" in caught.value.way_out


def test_no_number_of_ranks_is_enough(make: Make) -> None:
    """Then none is offered."""
    with pytest.raises(MemoryBudgetError) as caught:
        make(size=2, limits=MemoryLimits((1000,)), apart=True)
    assert "--tp-size" not in str(caught.value)
