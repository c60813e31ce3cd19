"""Clusters that can be, and those that cannot."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from mlxcel.cluster.addresses import Address, parse_address
from mlxcel.cluster.topology import Node, NodeRole, Topology, check_name, parse_role
from mlxcel.cluster.topology_checks import check_topology, check_transport
from mlxcel.errors import TopologyError, UnsupportedError, UsageError


def head(address: str = "127.0.0.1:19000", **fields: Any) -> Node:
    return attrs.evolve(Node("coordinator", parse_address(address, "test"), "hybrid"), **fields)


def stage(number: int | None, address: str = "", **fields: Any) -> Node:
    host = parse_address(address or f"10.0.0.{number or 0}:19001", "test")
    role: NodeRole = "pipeline_stage"
    return attrs.evolve(Node(f"stage-{number}", host, role, number), **fields)


def rank(number: int, of: int) -> Node:
    address = Address(f"10.0.{number}.{of}", 19001)
    return Node(f"s{number}-r{of}", address, "pipeline_tensor_parallel", number, of)


def cluster(*nodes: Node, stages: int = 2, ranks: int = 1) -> Topology:
    return Topology(nodes, pipeline_parallel_size=stages, tensor_parallel_size=ranks)


def test_the_order_of_the_nodes() -> None:
    """The coordinator comes first, then stage by stage, rank by rank, however they are given."""
    nodes = (head(), rank(0, 0), rank(0, 1), rank(1, 0), rank(1, 1))
    mixed = cluster(*reversed(nodes), ranks=2)
    assert mixed.nodes == nodes
    assert mixed == cluster(*nodes, ranks=2)
    assert mixed.coordinator == nodes[0]
    assert mixed.stages == nodes[1:]
    assert mixed.node("s1-r0") == nodes[3]
    assert mixed.node("s2-r0") is None


@pytest.mark.parametrize(
    "topology",
    [
        cluster(head(), stage(0), stage(1)),
        cluster(stage(0), stage(1)),
        cluster(head("0.0.0.0:19000"), stage(0), stage(1)),
        cluster(head("10.0.0.9:1"), stage(0, "127.0.0.1:1"), stage(1, "localhost:2")),
        cluster(stage(0, layers=range(3)), stage(1, layers=range(3, 9))),
        cluster(rank(0, 0), rank(0, 1), rank(1, 0), rank(1, 1), ranks=2),
        cluster(rank(0, 0), rank(1, 0)),
        cluster(stage(0, memory_bytes=1), stage(1)),
    ],
)
def test_clusters_that_can_be(topology: Topology) -> None:
    """Nobody dials the coordinator, so only its own machine need know its address."""
    assert check_topology(topology, "a file") is topology


@pytest.mark.parametrize(
    ("topology", "problem"),
    [
        (cluster(head(stage=0), stage(0), stage(1)), "node 'coordinator' has a stage."),
        (cluster(head(rank=0), stage(0), stage(1)), "node 'coordinator' has a rank."),
        (cluster(head(memory_bytes=1), stage(0), stage(1)), "'coordinator' has memory_bytes."),
        (cluster(stage(None), stage(1)), "node 'stage-None' has no stage."),
        (cluster(stage(0, rank=0), stage(1)), "node 'stage-0' has a rank."),
        (
            cluster(attrs.evolve(rank(0, 0), rank=None), rank(1, 0)),
            "node 's0-r0' has no rank.",
        ),
        (cluster(head(), head(), stage(0), stage(1)), "there is more than one coordinator"),
        (cluster(stage(0), stage(1, id="stage-0")), "two nodes have the id stage-0."),
        (
            cluster(stage(0), stage(1, "10.0.0.0:19001")),
            "'stage-0' and 'stage-1' have the address 10.0.0.0:19001.",
        ),
        (
            cluster(head("10.0.0.1:19001"), stage(0), stage(1)),
            "'coordinator' and 'stage-1' have the address",
        ),
        (
            cluster(stage(0)),
            "1 nodes hold a stage, where pipeline_parallel_size is 2: stage 1 is missing.",
        ),
        (cluster(stage(0), stage(1), stage(2)), "node 'stage-2' has stage 2."),
        (
            cluster(rank(0, 0), rank(0, 1), rank(1, 0), ranks=2),
            "3 nodes hold a stage, where pipeline_parallel_size * tensor_parallel_size is "
            "2 * 2 = 4: stage 1 and rank 1 is missing.",
        ),
        (
            cluster(rank(0, 0), rank(0, 1), attrs.evolve(rank(1, 1), rank=0), rank(1, 0), ranks=2),
            "'s1-r1' and 's1-r0' both have stage 1 and rank 0.",
        ),
        (
            cluster(rank(0, 0), rank(0, 1), rank(0, 2), rank(1, 0), rank(1, 1), ranks=2),
            "node 's0-r2' has rank 2.",
        ),
        (cluster(head(), stages=0), "pipeline_parallel_size = 0 is out of range."),
        (cluster(head(), stages=1025), "pipeline_parallel_size = 1025 is out of range."),
        (cluster(head(), ranks=257), "tensor_parallel_size = 257 is out of range."),
        (cluster(head(), ranks=10**9), "tensor_parallel_size = 1000000000 is out of range."),
        (cluster(stage(0), stage(2)), "node 'stage-2' has stage 2."),
        (cluster(stage(-1, "10.0.0.7:1"), stage(0)), "node 'stage--1' has stage -1."),
        (
            cluster(stage(1), stage(1, "10.0.0.7:1", id="other")),
            "'stage-1' and 'other' both have stage 1.",
        ),
        (cluster(rank(0, 1), rank(1, 0)), "node 's0-r1' has rank 1."),
        (
            cluster(rank(0, 0), rank(0, 1), stage(1, "10.9.9.9:1"), rank(1, 1), ranks=2),
            "node 'stage-1' holds a whole stage (role 'pipeline_stage')",
        ),
        (cluster(stage(0, layers=range(3)), stage(1)), "'stage-0' has layers and node 'stage-1'"),
        (
            cluster(stage(0, layers=range(1, 3)), stage(1, layers=range(3, 4))),
            "node 'stage-0' has layers 1-2, but stage 0 must begin at layer 0.",
        ),
        (
            cluster(stage(0, layers=range(3)), stage(1, layers=range(4, 9))),
            "node 'stage-1' has layers 4-8, but stage 1 must begin at layer 3.",
        ),
        (
            cluster(
                attrs.evolve(rank(0, 0), layers=range(3)),
                attrs.evolve(rank(0, 1), layers=range(2)),
                ranks=2,
                stages=1,
            ),
            "node 's0-r1' has layers 0-1, another rank of its stage has 0-2.",
        ),
        (cluster(stage(0, "10.0.0.1:0"), stage(1)), "node 'stage-0' has port 0"),
        (cluster(head("10.0.0.1:0"), stage(0), stage(1)), "node 'coordinator' has port 0"),
        (cluster(stage(0), stage(1, "0.0.0.0:1")), "'stage-1' has the address 0.0.0.0:1, which"),
        (
            cluster(stage(0), stage(1, "127.0.0.1:1")),
            "'stage-1' has the loopback address 127.0.0.1:1, which node 'stage-0' at 10.0.0.0",
        ),
        (cluster(stage(0, "[::1]:1"), stage(1)), "'stage-0' has the loopback address [::1]:1"),
    ],
)
def test_clusters_that_cannot_be(topology: Topology, problem: str) -> None:
    """What contradicts itself is refused; the text names the nodes and the source."""
    with pytest.raises(TopologyError) as caught:
        check_topology(topology, "a file")
    assert problem in caught.value.problem
    assert str(caught.value).startswith("a file: ")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("address", ["0.0.0.0:1", "127.0.0.1:1"])
def test_addresses_that_nobody_dials_name_the_flag(address: str) -> None:
    """The way out of an address that others cannot reach is --cluster-control-addr."""
    with pytest.raises(TopologyError, match="--cluster-control-addr"):
        check_topology(cluster(stage(0), stage(1, address)), "a file")


def test_layers_of_the_stages() -> None:
    """They are known when all stages have them, one range for all ranks of a stage."""
    ranges = (range(3), range(3, 9))
    whole = cluster(*(stage(n, layers=layers) for n, layers in enumerate(ranges)))
    ranks = [attrs.evolve(rank(n, of), layers=ranges[n]) for n in range(2) for of in range(2)]
    assert whole.layers == cluster(*ranks, ranks=2).layers == ranges
    assert cluster(stage(0), stage(1)).layers is None


def test_roles_and_their_aliases() -> None:
    """pp_tp and 2d are other words for a rank of a stage."""
    assert parse_role("pp_tp", "role") == parse_role("2d", "role") == "pipeline_tensor_parallel"
    assert parse_role("hybrid", "role") == "hybrid"
    with pytest.raises(UsageError, match="role: 'worker' is no role"):
        parse_role("worker", "role")


@pytest.mark.parametrize("role", ["prefill", "decode", "prefill_only", "decode_node", "router"])
def test_roles_of_disaggregated_serving(role: str) -> None:
    """They are known, and refused by name."""
    with pytest.raises(UnsupportedError, match=f"'{role}' is a role of disaggregated serving"):
        parse_role(role, "role")


@pytest.mark.parametrize("name", ["", "a b", "../up", ".hidden", "-flag", "x" * 65, 'quo"te', "ä"])
def test_what_is_no_name(name: str) -> None:
    """A name goes into file names and TOML strings as it is."""
    with pytest.raises(UsageError, match="is no name"):
        check_name(name, "--flag")


def test_a_transport_that_is_not_installed() -> None:
    """It is refused by name; the text says which there are."""
    check_transport("tcp", {"tcp"}, "a file: transport_backend")
    with pytest.raises(UnsupportedError) as caught:
        check_transport("rdma", {"tcp", "other"}, "a file: transport_backend")
    assert "a file: transport_backend: no transport 'rdma'" in str(caught.value)
    assert "(installed: other, tcp)" in str(caught.value)
