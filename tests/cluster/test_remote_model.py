"""A model divided among peers, by what they have, and what each is offered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs
import pytest

from mlxcel.checkpoint.weights_mode import RESERVE_BYTES
from mlxcel.cluster.addresses import Address
from mlxcel.cluster.introduce import introduce, plugin_versions
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.remote_model import Wishes, make_offers, plan_remotely
from mlxcel.cluster.resources import (
    declared_limits,
    free_memory,
    kv_budgets,
    reported_limits,
    weakest,
)
from mlxcel.cluster.topology import Node, Topology
from mlxcel.engine.model import Model
from mlxcel.errors import MemoryBudgetError, PartitionError
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import TensorParallel

Tiny = Callable[..., Path]
PLENTY = 64 << 30


def topology(*layers: range | None, memory: Sequence[int | None] = ()) -> Topology:
    sizes = memory or [None] * len(layers)
    return Topology(
        (
            Node("coordinator", Address("10.0.0.9", 19000), "hybrid"),
            *(
                Node(
                    f"stage-{stage}",
                    Address(f"10.0.0.{stage + 1}", 19001),
                    "pipeline_stage",
                    stage,
                    layers=given,
                    memory_bytes=sizes[stage],
                )
                for stage, given in enumerate(layers)
            ),
        ),
        pipeline_parallel_size=len(layers),
    )


def peers(plugins: Plugins, *memory: int) -> list[Introduction]:
    return [
        introduce(
            plugins,
            node=f"10.0.0.{stage + 1}:19001",
            role="peer",
            cluster="mlxcel-cluster",
            memory=size,
            blas="openblas",
            fast_blas=True,
        )
        for stage, size in enumerate(memory)
    ]


def ranges(model: Model) -> list[tuple[int, int]]:
    return [(stage.layer_range.start, stage.layer_range.stop) for stage in model.plan.stages]


def needs(path: Path, plugins: Plugins, wishes: Wishes) -> list[int]:
    """What each of the tiny model's layers adds to a stage, weights and caches."""
    model = plan_remotely(
        path, plugins, topology(None, None), peers(plugins, PLENTY, PLENTY), wishes, probe=True
    )
    return [layer.bytes + layer.kv_bytes for layer in model.plan.profile.layers]


def test_stages_have_the_names_of_their_nodes(tiny: Tiny, plugins: Plugins) -> None:
    """Assignments carry the ids of the topology, not those of one process."""
    model = plan_remotely(
        tiny("llama"),
        plugins,
        topology(None, None, None),
        peers(plugins, *[PLENTY] * 3),
        Wishes(),
        probe=True,
    )
    assert [stage.device_id for stage in model.plan.stages] == ["stage-0", "stage-1", "stage-2"]
    assert ranges(model) == [(0, 2), (2, 4), (4, 6)]


def test_a_small_peer_gets_less(tiny: Tiny, plugins: Plugins) -> None:
    """The memory that a peer reports limits its stage, caches of one sequence included."""
    path, wishes = tiny("llama"), Wishes(context=256)
    layer = needs(path, plugins, wishes)[0]
    small = RESERVE_BYTES + 3 * layer
    model = plan_remotely(
        path,
        plugins,
        topology(None, None),
        peers(plugins, PLENTY, small),
        wishes,
        probe=True,
    )
    head = model.plan.profile.head_bytes
    assert ranges(model)[1][0] > 3
    assert (ranges(model)[1][1] - ranges(model)[1][0]) * layer + head <= small - RESERVE_BYTES


def test_too_little_memory_names_the_peer(tiny: Tiny, plugins: Plugins) -> None:
    """No division fits: the error says which node lacks how much, and what to do there."""
    with pytest.raises(MemoryBudgetError) as caught:
        plan_remotely(
            tiny("llama"),
            plugins,
            topology(None, None),
            peers(plugins, PLENTY, 1 << 20),
            Wishes(),
            probe=True,
        )
    assert caught.value.device == "stage-1 @ 10.0.0.2:19001"
    assert "Free memory there" in str(caught.value)
    assert "local-stage" not in str(caught.value)


@pytest.mark.parametrize(
    ("probe", "flags"),
    [
        (True, ("--pp-auto 3", "--tp-size 2", "a smaller --ctx-size")),
        (False, ("pipeline_parallel_size = 3", "tensor_parallel_size = 2", "--ctx-size")),
    ],
)
@pytest.mark.parametrize("quantize", [None, "4:32"])
def test_what_would_help_a_cluster(
    tiny: Tiny, plugins: Plugins, probe: bool, flags: Sequence[str], quantize: str | None
) -> None:
    """It is told as whoever runs a cluster asks for it, and only what is not so already."""
    folder = tiny("llama", quantize=quantize)
    plan = partial(plan_remotely, folder, plugins, peers=peers(plugins, PLENTY, PLENTY))
    wishes = Wishes(weights="auto" if quantize is None else "quantized")
    nodes = topology(None, None, memory=(PLENTY, PLENTY))
    largest = max(
        stage.total_bytes for stage in plan(nodes, wishes=wishes, probe=False).plan.stages
    )
    size = RESERVE_BYTES + largest - 1
    with pytest.raises(MemoryBudgetError) as caught:
        plan_remotely(
            folder,
            plugins,
            topology(None, None, memory=(size, size)),
            peers(plugins, size, size),
            wishes,
            probe=probe,
        )
    helps = caught.value.way_out
    assert [flag for flag in flags if flag not in helps] == []
    assert ("quantized weights" in helps) == (quantize is None)


def test_a_cache_budget_is_told_of(tiny: Tiny, plugins: Plugins) -> None:
    """Where the operator has set one, a smaller one would help."""
    with pytest.raises(MemoryBudgetError, match="a smaller --kv-cache-budget") as caught:
        plan_remotely(
            tiny("llama"),
            plugins,
            topology(None, None),
            peers(plugins, PLENTY, 1 << 20),
            Wishes(kv_budget=1 << 20),
            probe=True,
        )
    assert "--ctx-size" not in str(caught.value)


def test_a_cache_budget_is_kept_free(tiny: Tiny, plugins: Plugins) -> None:
    """With --kv-cache-budget that much is left on every stage beside the reserve."""
    wishes = Wishes(kv_budget=1 << 30)
    memory = RESERVE_BYTES + (1 << 30)
    with pytest.raises(MemoryBudgetError):
        plan_remotely(
            tiny("llama"),
            plugins,
            topology(None, None),
            peers(plugins, memory, memory),
            wishes,
            probe=True,
        )
    model = plan_remotely(
        tiny("llama"),
        plugins,
        topology(None, None),
        peers(plugins, memory + (10 << 20), memory + (10 << 20)),
        wishes,
        probe=True,
    )
    found = peers(plugins, 1, 2)
    assert kv_budgets(model, found, topology(None, None), 1 << 30) == [1 << 30, 1 << 30]


def test_by_hand_only_what_is_declared_counts(tiny: Tiny, plugins: Plugins) -> None:
    """Without a probe two coordinators come to one plan, whatever the peers have left now."""
    path = tiny("llama")
    plans = [
        ranges(plan_remotely(path, plugins, topology(None, None), found, Wishes(), probe=False))
        for found in (peers(plugins, PLENTY, 1 << 20), peers(plugins, 0, PLENTY))
    ]
    assert plans[0] == plans[1] == [(0, 3), (3, 6)]
    given = topology(range(0, 5), range(5, 6))
    model = plan_remotely(path, plugins, given, peers(plugins, 0, 0), Wishes(), probe=False)
    assert ranges(model) == [(0, 5), (5, 6)]
    by_flag = Wishes(layers="0-0,1-5")
    model = plan_remotely(
        path, plugins, topology(None, None), peers(plugins, 0, 0), by_flag, probe=False
    )
    assert ranges(model) == [(0, 1), (1, 6)]


def test_declared_memory_limits_a_stage(tiny: Tiny, plugins: Plugins) -> None:
    """A hand-written resources.memory_bytes counts as a report would."""
    path, wishes = tiny("llama"), Wishes(context=256)
    small = RESERVE_BYTES + 3 * needs(path, plugins, wishes)[0]
    declared = topology(None, None, memory=[None, small])
    model = plan_remotely(path, plugins, declared, peers(plugins, 1, 1), wishes, probe=False)
    assert ranges(model)[1][0] > 3


def test_wrong_layers_are_refused(tiny: Tiny, plugins: Plugins) -> None:
    """Ranges that do not tile the model are a fault of the file or flag, not of a peer."""
    with pytest.raises(PartitionError):
        plan_remotely(
            tiny("llama"),
            plugins,
            topology(range(0, 5), range(4, 6)),
            peers(plugins, 0, 0),
            Wishes(),
            probe=False,
        )


def test_the_weakest_decides(plugins: Plugins) -> None:
    """One CPU among GPUs, one slow BLAS, one that does not say its memory: all are as poor."""
    strong = attrs.evolve(peers(plugins, PLENTY)[0], device="gpu")
    weak = attrs.evolve(strong, node="10.0.0.2:1", device="cpu", fast_blas=False, memory=10)
    assert (weakest([strong]).device, weakest([strong]).fast_blas) == ("gpu", True)
    both = weakest([strong, weak])
    assert (both.device, both.fast_blas, both.memory) == ("cpu", False, 20)
    assert weakest([strong, attrs.evolve(weak, memory=0)]).memory is None


def test_unpacked_weights_stay_packed_where_they_do_not_fit(tiny: Tiny, plugins: Plugins) -> None:
    """What auto would unpack for speed is not unpacked if the peers could not hold it."""
    path = tiny("llama", quantize="4:32")
    rich = peers(plugins, PLENTY, PLENTY)
    unpacked = plan_remotely(path, plugins, topology(None, None), rich, Wishes(), probe=True)
    assert unpacked.weights.dequantize
    most = max(stage.total_bytes for stage in unpacked.plan.stages)
    kv = max(stage.kv_bytes for stage in unpacked.plan.stages)
    little = RESERVE_BYTES + kv + (most - kv) // 2
    tight = peers(plugins, little, little)
    packed = plan_remotely(path, plugins, topology(None, None), tight, Wishes(), probe=True)
    assert not packed.weights.dequantize


def test_peers_of_one_machine_share_its_memory(tiny: Tiny, plugins: Plugins) -> None:
    """What two peers of one host report is the same memory, not twice as much."""
    first, second, third = peers(plugins, PLENTY, PLENTY, PLENTY)
    second = attrs.evolve(second, node="10.0.0.1:19002")
    assert free_memory([first, second, third]) == [PLENTY // 2, PLENTY // 2, PLENTY]
    assert reported_limits([first, second]).sizes == (PLENTY // 2, PLENTY // 2)


def test_caches_get_what_is_left(tiny: Tiny, plugins: Plugins) -> None:
    """A stage's cache budget is its peer's memory less weights and reserve."""
    found = peers(plugins, PLENTY, 0)
    model = plan_remotely(tiny("llama"), plugins, topology(None, None), found, Wishes(), probe=True)
    weights = model.plan.stages[0].estimated_memory_bytes
    assert kv_budgets(model, found, topology(None, None)) == [
        PLENTY - weights - RESERVE_BYTES,
        None,
    ]


def test_caches_keep_to_what_a_file_allows(tiny: Tiny, plugins: Plugins) -> None:
    """A node's ``memory_bytes`` bounds its caches too, and what is free still bounds both."""
    allowed = topology(None, None, None, memory=(PLENTY // 2, PLENTY, PLENTY // 4))
    found = peers(plugins, PLENTY, PLENTY // 2, 0)
    model = plan_remotely(tiny("llama"), plugins, allowed, found, Wishes(), probe=False)
    weights = [stage.estimated_memory_bytes + RESERVE_BYTES for stage in model.plan.stages]
    assert kv_budgets(model, found, allowed) == [
        PLENTY // 2 - weights[0],
        PLENTY // 2 - weights[1],
        PLENTY // 4 - weights[2],
    ]


def test_offers(tiny: Tiny, plugins: Plugins) -> None:
    """Each peer gets its own range, who follows it, and what all must agree about."""
    cluster = topology(None, None)
    found = peers(plugins, PLENTY, PLENTY)
    model = plan_remotely(tiny("llama"), plugins, cluster, found, Wishes(), probe=True)
    ours = introduce(plugins, node="coordinator", role="coordinator", cluster=cluster.name)
    first, last = make_offers(model, cluster, ours, credits=9, timeout=7.0)
    again, _ = make_offers(model, cluster, ours, credits=9, timeout=7.0)
    assert (first.node, first.stage, first.start, first.stop) == ("stage-0", 0, 0, 3)
    assert (last.node, last.stage, last.start, last.stop) == ("stage-1", 1, 3, 6)
    assert (first.dials, last.dials) == ({"0-1": "10.0.0.2:19001"}, {})
    assert first.session == last.session != again.session
    assert first.digest == last.digest == again.digest
    assert first.topology == last.topology
    assert "10.0.0.9:19000" in first.topology
    assert set(first.plugins) == {"family:llama", "transport:tcp"}
    assert first.versions == ours.versions
    assert (first.identity.layers, first.credits, first.timeout) == (6, 9, 7.0)


def mesh(stages: int, ranks: int, memory: Sequence[int | None] = ()) -> Topology:
    """So many stages of so many ranks; ``memory`` is what they declare, by place."""
    sizes = memory or [None] * (stages * ranks)
    nodes = [
        Node(
            f"s{place // ranks}-r{place % ranks}",
            Address(f"10.0.0.{place + 1}", 19001),
            "pipeline_tensor_parallel",
            *divmod(place, ranks),
            memory_bytes=sizes[place],
        )
        for place in range(stages * ranks)
    ]
    return Topology(tuple(nodes), "m", stages, ranks)


def test_offers_of_a_mesh(tiny: Tiny, plugins: Plugins) -> None:
    """Every rank of a stage gets its layers, and whom to connect to: its equal in the next stage
    and the higher ranks of its own."""
    cluster, found = mesh(2, 2), peers(plugins, *[PLENTY] * 4)
    tensor = TensorParallel(7, head="vocab_parallel")  # the topology has the size
    wishes = Wishes(tensor=tensor)
    model = plan_remotely(tiny("llama"), plugins, cluster, found, wishes, probe=True)
    offers = make_offers(model, cluster, found[0], credits=9, timeout=7.0, rank_timeout=3.0)
    assert [(offer.node, offer.place) for offer in offers] == [
        ("s0-r0", (0, 0)),
        ("s0-r1", (0, 1)),
        ("s1-r0", (1, 0)),
        ("s1-r1", (1, 1)),
    ]
    assert [offer.dials for offer in offers] == [
        {"s0r0-s1r0": "10.0.0.3:19001", "s0r0-s0r1": "10.0.0.2:19001"},
        {"s0r1-s1r1": "10.0.0.4:19001"},
        {"s1r0-s1r1": "10.0.0.4:19001"},
        {},
    ]
    assert {(offer.stages, offer.tensor, offer.rank_timeout) for offer in offers} == {
        (2, TensorParallel(2, head="vocab_parallel"), 3.0)
    }
    assert [(offer.start, offer.stop) for offer in offers] == [(0, 3), (0, 3), (3, 6), (3, 6)]
    assert [stage.device_id for stage in model.plan.stages] == ["s0-r0, s0-r1", "s1-r0, s1-r1"]
    assert len({offer.digest for offer in offers}) == 1


def test_a_rank_needs_its_share_of_a_stage(tiny: Tiny, plugins: Plugins) -> None:
    """What an offer counts, and what is left for caches, are those of one peer."""
    path = tiny("llama")
    found = peers(plugins, *[PLENTY] * 4)
    whole = plan_remotely(path, plugins, topology(None, None), found[:2], Wishes(), probe=True)
    model = plan_remotely(path, plugins, mesh(2, 2), found, Wishes(), probe=True)
    ours = make_offers(model, mesh(2, 2), found[0], credits=1, timeout=1.0)
    assert ours[0].bytes < 0.75 * whole.plan.stages[0].estimated_memory_bytes
    assert kv_budgets(model, found, mesh(2, 2)) == [
        PLENTY - offer.bytes - RESERVE_BYTES for offer in ours
    ]
    assert kv_budgets(model, found, mesh(2, 2), 5) == [5, 5, 5, 5]


def test_the_poorest_rank_limits_its_stage(tiny: Tiny, plugins: Plugins) -> None:
    """All ranks hold as much as each other, so what one lacks no other can make good."""
    rich_poor = peers(plugins, PLENTY, 10, PLENTY, PLENTY)
    assert reported_limits(rich_poor, 2).sizes == (10, PLENTY)
    with pytest.raises(MemoryBudgetError) as caught:
        plan_remotely(tiny("llama"), plugins, mesh(2, 2), rich_poor, Wishes(), probe=True)
    assert caught.value.device == "s0-r0 @ 10.0.0.1:19001, s0-r1 @ 10.0.0.2:19001"
    declared = declared_limits(mesh(2, 2, [PLENTY, None, 20, PLENTY]))
    assert declared is not None and declared.sizes == (PLENTY, 20)


def test_introductions_name_plugins_by_kind(plugins: Plugins) -> None:
    """Versions are told per kind:name, for all that is installed."""
    versions = plugin_versions(plugins)
    assert versions["family:llama"] == versions["transport:tcp"]
    said = peers(plugins, 5)[0]
    assert set(said.versions) == {"mlxcel", "mlx", "mlx-lm", "BLAS"}
    assert "llama" in said.families
