"""Whether a cluster can be as it is described."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from mlxcel.cluster.topology import LARGEST, Node, Topology
from mlxcel.errors import TopologyError, UnsupportedError
from mlxcel.partition.ranges import format_ranges
from mlxcel.tensor.options import MOST_RANKS


def check_topology(topology: Topology, source: str) -> Topology:
    """``topology``, if such a cluster can be.

    Args:
        source: Where it comes from: a file, or flags.

    Raises:
        TopologyError: Nodes are missing, doubled, or have what their role does not allow, or one
            could not reach another.
    """
    checks = (_roles, _doubles, _sizes, _places, _layers, _reach)
    for check in checks:
        if found := check(topology):
            raise TopologyError(*found, source)
    return topology


def check_transport(transport: str, transports: Collection[str], name: str) -> None:
    """Refuse a transport that is not installed; ``name`` is the flag or key it is from.

    Raises:
        UnsupportedError: It is not among ``transports``.
    """
    if transport not in transports:
        installed = ", ".join(sorted(transports)) or "none"
        raise UnsupportedError(
            f"{name}: no transport {transport!r} is installed (installed: {installed}).",
            "Install the package that provides it on every node, or choose another.",
        )


_Found = tuple[str, str] | None
"""What is wrong, and the way out."""


def _title(node: Node) -> str:
    return f"node {node.id!r}"


def _roles(topology: Topology) -> _Found:
    """What contradicts itself within one node."""
    for node in topology.nodes:
        wanted = {"stage": node.role != "hybrid", "rank": node.role == "pipeline_tensor_parallel"}
        for key, wants in wanted.items():
            if wants and getattr(node, key) is None:
                return f"{_title(node)} has no {key}.", f"Role {node.role!r} needs one."
            if not wants and getattr(node, key) is not None:
                return (
                    f"{_title(node)} has a {key}.",
                    f"Its role {node.role!r} has none: remove it.",
                )
        for key in ("memory_bytes", "layers"):
            if node.role == "hybrid" and getattr(node, key) is not None:
                return f"{_title(node)} has {key}.", "A coordinator holds no layers: remove it."
    if len(topology.nodes) - len(topology.stages) > 1:
        return "there is more than one coordinator (role 'hybrid').", "Leave only one."
    return None


def _doubles(topology: Topology) -> _Found:
    for key in ("id", "address"):
        owners: dict[object, Node] = {}
        for index, node in enumerate(topology.nodes):
            value = getattr(node, key)
            if value in owners:
                first = owners[value]
                whose = "two nodes" if key == "id" else f"{first.id!r} and {node.id!r}"
                return f"{whose} have the {key} {value}.", f"Give each an {key} of its own."
            owners[value] = topology.nodes[index]
    return None


def _sizes(topology: Topology) -> _Found:
    for key, most in (("pipeline_parallel_size", LARGEST), ("tensor_parallel_size", MOST_RANKS)):
        if not 1 <= (size := getattr(topology, key)) <= most:
            return f"{key} = {size} is out of range.", f"Give 1 to {most}."
    return None


def _slot(stage: int, rank: int, ranks: int) -> str:
    """What errors call a place."""
    return f"stage {stage}" if ranks == 1 else f"stage {stage} and rank {rank}"


def _places(topology: Topology) -> _Found:
    stages, ranks = topology.pipeline_parallel_size, topology.tensor_parallel_size
    owners: dict[tuple[int, int], Node] = {}
    for node in topology.stages:
        stage, rank = place = node.stage or 0, node.rank or 0
        for key, number, size in (("stage", stage, stages), ("rank", rank, ranks)):
            if not 0 <= number < size:
                return (
                    f"{_title(node)} has {key} {number}.",
                    f"With {size} of them they count from 0 to {size - 1}.",
                )
        if ranks > 1 and node.rank is None:
            return (
                f"{_title(node)} holds a whole stage (role {node.role!r}), where "
                f"tensor_parallel_size is {ranks}.",
                "Give it the role 'pipeline_tensor_parallel' and a rank.",
            )
        if place in owners:
            return (
                f"{owners[place].id!r} and {node.id!r} both have {_slot(stage, rank, ranks)}.",
                "Each is held by exactly one node.",
            )
        owners[place] = node
    for stage, rank in itertools.product(range(stages), range(ranks)):
        if (stage, rank) not in owners:
            product = f"{stages}" if ranks == 1 else f"{stages} * {ranks} = {stages * ranks}"
            return (
                f"{len(owners)} nodes hold a stage, where pipeline_parallel_size"
                f"{' * tensor_parallel_size' * (ranks > 1)} is {product}: "
                f"{_slot(stage, rank, ranks)} is missing.",
                "Add the node that holds it, or correct the size.",
            )
    return None


def _layers(topology: Topology) -> _Found:
    given = [node for node in topology.stages if node.layers is not None]
    if not given:
        return None
    if missing := [node for node in topology.stages if node.layers is None]:
        return (
            f"{_title(given[0])} has layers and {_title(missing[0])} has none.",
            "Give the layers of every stage, or of none.",
        )
    expected, stage = range(0), -1
    for node in given:
        assert node.layers is not None
        if node.stage == stage:
            if node.layers != expected:
                return (
                    f"{_title(node)} has layers {format_ranges([node.layers])}, another rank of "
                    f"its stage has {format_ranges([expected])}.",
                    "All ranks of a stage hold the same layers.",
                )
        elif node.layers.start != expected.stop:
            return (
                f"{_title(node)} has layers {format_ranges([node.layers])}, but stage {node.stage} "
                f"must begin at layer {expected.stop}.",
                "The stages hold every layer exactly once, in order.",
            )
        expected, stage = node.layers, node.stage or 0
    return None


def _reach(topology: Topology) -> _Found:
    """Whether every node can be dialled by those that do: nobody dials the coordinator."""
    for node in topology.nodes:
        if node.address.port == 0:
            return (
                f"{_title(node)} has port 0 ({node.address}).",
                "Give the port that it listens on (its --cluster-control-addr).",
            )
    for node in topology.stages:
        if node.address.is_unspecified:
            return (
                f"{_title(node)} has the address {node.address}, which nobody can dial.",
                "Start it with --cluster-control-addr and a concrete address of its machine.",
            )
    local = [node for node in topology.stages if node.address.is_loopback]
    remote = [node for node in topology.stages if not node.address.is_loopback]
    if local and remote:
        return (
            f"{_title(local[0])} has the loopback address {local[0].address}, which "
            f"{_title(remote[0])} at {remote[0].address} could not dial.",
            "Start it with --cluster-control-addr and an address that the other machines reach.",
        )
    return None
