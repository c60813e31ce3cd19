"""Which node of a mesh another one sends to."""

from __future__ import annotations

from mlxcel.cluster.node_registry import NodeRegistry
from mlxcel.cluster.topology import Node
from mlxcel.errors import TopologyError
from mlxcel.transport.contract import TrafficClass


class PipelineTensorParallelRouter:
    """The ways that lead out of ``node``.

    Hidden states pass between equal ranks of neighbouring stages, and collectives never leave
    their stage: there is no other way, so neither class of traffic can get into the other's.

    Args:
        registry: All nodes.
        node: One that holds layers.
    """

    def __init__(self, registry: NodeRegistry, node: Node) -> None:
        assert node.stage is not None, "a coordinator is no part of the mesh"
        self._registry = registry
        self._node = node
        self._stage = node.stage
        self._rank = node.rank or 0

    def reachable(self, traffic_class: TrafficClass) -> tuple[Node, ...]:
        """All nodes that a way of this class leads to, by stage and rank."""
        if traffic_class == "tp_collective":
            stage = self._registry.nodes_at_stage(self._stage)
            return tuple(node for node in stage if node != self._node)
        column = self._registry.nodes_at_rank(self._rank)
        return tuple(node for node in column if abs((node.stage or 0) - self._stage) == 1)

    def route(self, preferred_stage: int, preferred_rank: int, traffic_class: TrafficClass) -> Node:
        """The node at a place.

        Raises:
            TopologyError: No way of this class leads there.
        """
        for node in self.reachable(traffic_class):
            if (node.stage, node.rank or 0) == (preferred_stage, preferred_rank):
                return node
        ways = ", ".join(node.id for node in self.reachable(traffic_class)) or "nowhere"
        raise TopologyError(
            f"no way of the class {traffic_class} leads from node {self._node.id!r} to stage "
            f"{preferred_stage}, rank {preferred_rank}.",
            f"It leads to: {ways}.",
            self._registry.topology.name,
        )
