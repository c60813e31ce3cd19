"""Which node of a mesh another one may send to."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.node_registry import NodeRegistry
from mlxcel.cluster.router import PipelineTensorParallelRouter
from mlxcel.cluster.topology import Node, Topology
from mlxcel.cluster.topology_checks import check_topology
from mlxcel.errors import TopologyError
from mlxcel.transport.contract import TrafficClass

STAGES, RANKS = 3, 2


@pytest.fixture
def registry() -> NodeRegistry:
    """Three stages of two ranks each, and their coordinator."""
    mesh = [
        Node(
            f"s{stage}-r{rank}",
            Address(f"10.0.{stage}.{rank}", 19001),
            "pipeline_tensor_parallel",
            stage,
            rank,
        )
        for rank in range(RANKS)
        for stage in range(STAGES)
    ]
    nodes = (*mesh, Node("coordinator", Address("127.0.0.1", 19000), "hybrid"))
    return NodeRegistry(check_topology(Topology(nodes, "mesh", STAGES, RANKS), "test"))


def ids(nodes: tuple[Node, ...]) -> list[str]:
    return [node.id for node in nodes]


def router(registry: NodeRegistry, name: str) -> PipelineTensorParallelRouter:
    node = registry.topology.node(name)
    assert node is not None
    return PipelineTensorParallelRouter(registry, node)


def test_rows_and_columns(registry: NodeRegistry) -> None:
    """All ranks of a stage, and all nodes of a rank, each in order; the coordinator is neither."""
    assert ids(registry.nodes_at_stage(1)) == ["s1-r0", "s1-r1"]
    assert ids(registry.nodes_at_rank(0)) == ["s0-r0", "s1-r0", "s2-r0"]
    assert registry.nodes_at_stage(3) == registry.nodes_at_rank(2) == ()


def test_a_pipeline_is_a_single_column() -> None:
    """Nodes that are whole stages stand at rank 0."""
    nodes = tuple(
        Node(f"stage-{n}", Address("10.0.0.1", n + 1), "pipeline_stage", n) for n in range(2)
    )
    assert ids(NodeRegistry(Topology(nodes, "p", 2)).nodes_at_rank(0)) == ["stage-0", "stage-1"]


@pytest.mark.parametrize(
    ("name", "traffic", "reachable"),
    [
        ("s0-r0", "pp_activation", ["s1-r0"]),
        ("s1-r1", "pp_activation", ["s0-r1", "s2-r1"]),
        ("s1-r1", "tp_collective", ["s1-r0"]),
        ("s2-r0", "tp_collective", ["s2-r1"]),
    ],
)
def test_where_each_class_of_traffic_leads(
    registry: NodeRegistry, name: str, traffic: TrafficClass, reachable: list[str]
) -> None:
    """Hidden states pass between equal ranks of neighbours, collectives stay in their stage."""
    assert ids(router(registry, name).reachable(traffic)) == reachable


def test_a_route_is_one_node(registry: NodeRegistry) -> None:
    """Every place is reached in at most one class of traffic."""
    way = router(registry, "s1-r0")
    found = {"pp_activation": [], "tp_collective": []}  # type: dict[TrafficClass, list[str]]
    for traffic, names in found.items():
        for stage, rank in itertools.product(range(STAGES), range(RANKS)):
            with contextlib.suppress(TopologyError):
                names.append(way.route(stage, rank, traffic).id)
    assert found == {"pp_activation": ["s0-r0", "s2-r0"], "tp_collective": ["s1-r1"]}


def test_a_place_that_no_way_leads_to(registry: NodeRegistry) -> None:
    """The error names both ends, the class, and where its ways lead."""
    with pytest.raises(TopologyError, match="from node 's1-r0' to stage 2, rank 1") as caught:
        router(registry, "s1-r0").route(2, 1, "pp_activation")
    assert "no way of the class pp_activation" in caught.value.problem
    assert caught.value.way_out == "It leads to: s0-r0, s2-r0."
