"""Which peer holds which stage, or which rank of it."""

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
    """Give each place of a coordinator's cluster a peer, stage by stage: the first by their text,
    whatever order they come in.

    Raises:
        TopologyError: One is listed twice, there are too few, or they cannot reach each other.
    """
    assert options.control is not None, "a coordinator has an address"
    source = "--cluster-peers" if options.discovery == "static" else "the peers' beacons"
    ordered = sorted(peers, key=str)
    ranks = options.tensor.size
    if len(ordered) < options.places:
        each = f" with {ranks} ranks each, which need {options.places}" * (ranks > 1)
        raise TopologyError(
            f"{len(ordered)} peers are too few for {options.stages} stages{each}.",
            f"Start more peers, or ask for fewer with --pp-auto{' and --tp-size' * (ranks > 1)}.",
            source,
        )
    used, spares = ordered[: options.places], ordered[options.places :]
    topology = Topology(
        nodes=(
            Node(COORDINATOR, options.control, "hybrid"),
            *(_node(place, address, ranks) for place, address in enumerate(used)),
        ),
        name=options.name,
        pipeline_parallel_size=options.stages,
        tensor_parallel_size=ranks,
        transport_backend=options.transport or DEFAULT_TRANSPORT,
    )
    return Assignment(check_topology(topology, source), tuple(spares))


def _node(place: int, address: Address, ranks: int) -> Node:
    """The node that is number ``place``: stage after stage, and in each its ranks."""
    stage, rank = divmod(place, ranks)
    if ranks == 1:
        return Node(f"stage-{stage}", address, "pipeline_stage", stage)
    return Node(f"s{stage}-r{rank}", address, "pipeline_tensor_parallel", stage, rank)
