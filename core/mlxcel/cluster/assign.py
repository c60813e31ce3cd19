"""Which peer holds which stage."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.options import ClusterOptions
from mlxcel.cluster.topology import COORDINATOR, DEFAULT_TRANSPORT, Node, Topology
from mlxcel.cluster.topology_checks import check_topology
from mlxcel.errors import TopologyError


@attrs.frozen
class Assignment:
    """A topology, and the peers that have no place in it."""

    topology: Topology
    spares: tuple[Address, ...] = ()


def assign(options: ClusterOptions, peers: Iterable[Address]) -> Assignment:
    """Give each stage of a coordinator's cluster a peer: the first by their text, whatever order
    they come in.

    Raises:
        TopologyError: One is listed twice, there are too few, or they cannot reach each other.
    """
    assert options.control is not None, "a coordinator has an address"
    source = "--cluster-peers" if options.discovery == "static" else "the peers' beacons"
    ordered = sorted(peers, key=str)
    if len(ordered) < options.stages:
        raise TopologyError(
            f"{len(ordered)} peers are too few for {options.stages} stages.",
            "Start more peers, or ask for fewer stages with --pp-auto.",
            source,
        )
    used, spares = ordered[: options.stages], ordered[options.stages :]
    stages = [
        Node(f"stage-{stage}", address, "pipeline_stage", stage)
        for stage, address in enumerate(used)
    ]
    topology = Topology(
        nodes=(Node(COORDINATOR, options.control, "hybrid"), *stages),
        name=options.name,
        pipeline_parallel_size=options.stages,
        transport_backend=options.transport or DEFAULT_TRANSPORT,
    )
    return Assignment(check_topology(topology, source), tuple(spares))
