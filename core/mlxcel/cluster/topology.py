"""Which nodes a cluster has, and what each of them is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

import attrs

from mlxcel.cluster.addresses import Address
from mlxcel.errors import UnsupportedError, UsageError

NodeRole = Literal["hybrid", "pipeline_stage", "pipeline_tensor_parallel"]
"""A coordinator, a whole stage, one rank of a stage."""

ROLES: tuple[NodeRole, ...] = get_args(NodeRole)
ROLE_ALIASES: Mapping[str, NodeRole] = {
    "pp_tp": "pipeline_tensor_parallel",
    "2d": "pipeline_tensor_parallel",
}
DISAGGREGATED_ROLES = ("prefill", "decode", "encode", "router", "kv_store", "kv_transfer")
"""Beginnings of roles in clusters that prefill and decode on different machines."""

DEFAULT_NAME = "mlxcel-cluster"
DEFAULT_TRANSPORT = "tcp"
COORDINATOR = "coordinator"

LARGEST = 1024
"""Stages of a cluster."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@attrs.frozen
class Node:
    """One node.

    ``stage`` is None for a coordinator, ``rank`` for all but ranks of a stage. ``memory_bytes``
    and ``layers`` (half-open) are what a hand-written file says of it, and None otherwise.
    """

    id: str
    address: Address
    role: NodeRole
    stage: int | None = None
    rank: int | None = None
    memory_bytes: int | None = None
    layers: range | None = None


def _order(node: Node) -> tuple[int, int, int]:
    return (ROLES.index(node.role) > 0, node.stage or 0, node.rank or 0)


def _sorted(nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(sorted(nodes, key=_order))


@attrs.frozen
class Topology:
    """The nodes of a cluster: the coordinator first, if there is one, then stage by stage.

    ``secret_file`` is where a hand-written file says that the secret is.
    """

    nodes: tuple[Node, ...] = attrs.field(converter=_sorted)
    name: str = DEFAULT_NAME
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    transport_backend: str = DEFAULT_TRANSPORT
    secret_file: Path | None = None

    @property
    def coordinator(self) -> Node | None:
        """The node with the role ``hybrid``."""
        return next((node for node in self.nodes if node.role == "hybrid"), None)

    @property
    def stages(self) -> tuple[Node, ...]:
        """The nodes that hold layers, by stage and rank."""
        return tuple(node for node in self.nodes if node.role != "hybrid")

    @property
    def layers(self) -> tuple[range, ...] | None:
        """The layers of each stage as the file gives them, or None if it does not."""
        ranges = tuple(node.layers for node in self.stages if not node.rank)
        return tuple(r for r in ranges if r is not None) if None not in ranges else None

    def node(self, name: str) -> Node | None:
        """The node with this id."""
        return next((node for node in self.nodes if node.id == name), None)

    def describe(self) -> str:
        """The cluster in a few lines, a node a line."""
        return "\n".join(
            [
                f"Cluster: {self.name}",
                f"TP size: {self.tensor_parallel_size}, PP size: {self.pipeline_parallel_size}",
                f"Nodes ({len(self.nodes)}):",
                *(f"- {node.id} @ {node.address} [{node.role}]" for node in self.nodes),
            ]
        )


def parse_role(text: str, name: str) -> NodeRole:
    """The role called ``text``, which may be an alias; ``name`` is the flag or key it is from.

    Raises:
        UnsupportedError: It is a role of disaggregated serving.
        UsageError: There is no such role.
    """
    known: dict[str, NodeRole] = {**{role: role for role in ROLES}, **ROLE_ALIASES}
    if text.startswith(DISAGGREGATED_ROLES):
        raise UnsupportedError(
            f"{name}: {text!r} is a role of disaggregated serving, which mlxcel does not have: "
            f"every stage both prefills and decodes.",
            f"Give one of {', '.join(ROLES)}.",
        )
    if text not in known:
        raise UsageError(f"{name}: {text!r} is no role.", f"Give one of {', '.join(known)}.")
    return known[text]


def check_name(text: str, name: str) -> str:
    """``text`` as the name of a cluster, node or transport; ``name`` is where it is from.

    Raises:
        UsageError: It has characters that a name cannot have, or too many.
    """
    if not _NAME.fullmatch(text):
        raise UsageError(
            f"{name}: {text!r} is no name.",
            "Use up to 64 letters, digits, dots, hyphens and underscores, beginning with a "
            "letter or digit.",
        )
    return text
