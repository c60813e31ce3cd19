"""The nodes of a mesh by their places: its rows are stages, its columns ranks."""

from __future__ import annotations

import attrs

from mlxcel.cluster.topology import Node, Topology


@attrs.frozen
class NodeRegistry:
    """Finds the nodes of ``topology`` that hold layers; it is one that has been checked."""

    topology: Topology

    def nodes_at_stage(self, stage: int) -> tuple[Node, ...]:
        """The ranks of ``stage`` in their order; none where there is no such stage."""
        return tuple(node for node in self.topology.stages if node.stage == stage)

    def nodes_at_rank(self, rank: int) -> tuple[Node, ...]:
        """The nodes with ``rank``, one of each stage in their order."""
        return tuple(node for node in self.topology.stages if (node.rank or 0) == rank)
