"""On the manual path every node comes to the coordinator's plan by itself, or says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.own_plan import own_digest
from mlxcel.cluster.remote_model import Wishes, make_offers, plan_remotely
from mlxcel.cluster.topology import Node, Topology
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import TensorParallel

Tiny = Callable[..., Path]

GIB = 1 << 30
PEERS = [
    Introduction(f"10.0.0.{i}:1", "peer", "c", {}, {}, ("llama",), memory=i * GIB) for i in (2, 3)
]


def topology(*, stages: int = 2, memory: int | None = None, layers: str | None = None) -> Topology:
    """``memory`` is what the first stage declares, ``layers`` divides six among two stages."""
    cut = None if layers is None else int(layers)
    ranges = (None,) * stages if cut is None else (range(cut), range(cut, 6))
    return Topology(
        tuple(
            Node(
                f"stage-{i}",
                Address(f"10.0.0.{i + 2}", 1),
                "pipeline_stage",
                i,
                memory_bytes=memory if i == 0 else None,
                layers=ranges[i],
            )
            for i in range(stages)
        ),
        pipeline_parallel_size=stages,
    )


@pytest.mark.parametrize(
    ("own", "wishes"),
    [
        (topology(), Wishes()),
        (topology(layers="1"), Wishes()),
        (topology(), Wishes(layers="0-4,5")),
        (topology(), Wishes(by="time")),
        (topology(memory=4 * GIB), Wishes(context=64)),
        (topology(memory=4 * GIB), Wishes(kv_budget=1 << 20)),
        (topology(), Wishes(dtype="bfloat16")),
    ],
)
def test_a_node_comes_to_the_coordinators_plan(
    tiny: Tiny, plugins: Plugins, own: Topology, wishes: Wishes
) -> None:
    """With the same file and flags, whatever types the coordinator has chosen."""
    folder = tiny("llama", quantize="4:32")
    model = plan_remotely(folder, plugins, own, PEERS, wishes, probe=False)
    offers = make_offers(model, own, PEERS[0], credits=4, timeout=1.0, terms=wishes.terms)
    for offer in offers:
        assert own_digest(offer, folder, plugins, own, layers=wishes.layers) == offer.digest


def test_what_only_the_coordinator_takes_comes_with_the_offer(tiny: Tiny, plugins: Plugins) -> None:
    """A node that has no flag for the balance and the caches plans by the coordinator's."""
    folder, own = tiny("qwen3_5"), topology(stages=3)
    peers, digests = [*PEERS, attrs.evolve(PEERS[0], node="10.0.0.4:1")], set()
    for by in ("bytes", "time"):
        wishes = Wishes(by=by)
        model = plan_remotely(folder, plugins, own, peers, wishes, probe=False)
        offer, *_ = make_offers(model, own, PEERS[0], credits=4, timeout=1.0, terms=wishes.terms)
        assert own_digest(offer, folder, plugins, own) == offer.digest
        digests.add(offer.digest)
    assert len(digests) == 2, "the balance makes a difference here"


def test_other_flags_are_another_plan(tiny: Tiny, plugins: Plugins) -> None:
    """A node that was told other layers sees it before anything starts."""
    folder = tiny("llama")
    model = plan_remotely(folder, plugins, topology(), PEERS, Wishes(layers="0-1,2-5"), probe=False)
    offer, _ = make_offers(model, topology(), PEERS[0], credits=4, timeout=1.0)
    assert own_digest(offer, folder, plugins, topology(), layers="0-3,4-5") != offer.digest


def mesh(ranks: int) -> Topology:
    """One stage of so many ranks."""
    nodes = [
        Node(f"s0-r{rank}", Address(f"10.0.0.{rank + 2}", 1), "pipeline_tensor_parallel", 0, rank)
        for rank in range(ranks)
    ]
    return Topology(tuple(nodes), pipeline_parallel_size=1, tensor_parallel_size=ranks)


def test_a_rank_comes_to_the_coordinators_plan(tiny: Tiny, plugins: Plugins) -> None:
    """What ranks share out is the coordinator's to say, how many they are the file's."""
    folder, own = tiny("llama"), mesh(2)
    wishes = Wishes(tensor=TensorParallel(head="vocab_parallel"))
    model = plan_remotely(folder, plugins, own, PEERS, wishes, probe=False)
    offers = make_offers(model, own, PEERS[0], credits=4, timeout=1.0)
    for offer in offers:
        assert own_digest(offer, folder, plugins, own) == offer.digest
        other = attrs.evolve(offer, tensor=TensorParallel(2))
        assert own_digest(other, folder, plugins, own) != offer.digest
        assert own_digest(offer, folder, plugins, mesh(1)) != offer.digest
