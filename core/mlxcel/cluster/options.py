"""What the operator says about the cluster, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.topology import DEFAULT_NAME, DEFAULT_TRANSPORT, Topology
from mlxcel.tensor.options import ALONE, TensorParallel

Mode = Literal["local", "coordinator-auto", "coordinator-manual", "peer-auto", "peer-manual"]
"""What the command runs: no cluster, or a part of one, with a TOML file (manual) or without."""

Discovery = Literal["static", "mdns"]

CONFIG_FOLDER = Path(".mlxcel")
BEACON_PORT = 49555


@attrs.frozen
class ClusterOptions:
    """The flags that concern the cluster.

    Attributes:
        mode: What the command runs.
        models: The values of ``-m``; only a peer may have several.
        name: The cluster's name.
        node: This node's id in the TOML file; a peer without one learns it from the offer.
        stages: How many there are; 0 for a peer that does not know.
        tensor: How many ranks share each of them, and what they share out; a peer does not know.
        control: Where a peer listens; what the TOML has for the coordinator, which nobody dials.
            The host may be unspecified and the port 0 where a beacon announces them.
        secret: None in local mode and in a static dry run.
        topology: What the TOML file says, in the manual modes.
        peers: The peers' addresses as given or as the TOML file has them, by stage in the latter
            case; empty where beacons tell them.
        transport: The transport's name; None for a peer that takes what it is offered.
        layers: The value of ``--pp-layers``.
        config_out: Where the TOML is written, if the operator says so.
        discovery, discovery_timeout, discovery_port, discovery_target: How peers are found;
            seconds, a UDP port, and the host that a peer's beacons go to.
        http: Whether this node serves HTTP; a peer only does so where ``--port`` is given.
        heartbeat_grace: Seconds of silence after which a node counts as lost.
        dry_run: Whether to say only what would happen.
        notices: Lines for the operator.
    """

    mode: Mode = "local"
    models: tuple[Path, ...] = ()
    name: str = DEFAULT_NAME
    node: str = ""
    stages: int = 0
    tensor: TensorParallel = ALONE
    control: Address | None = None
    secret: ClusterSecret | None = None
    topology: Topology | None = None
    peers: tuple[Address, ...] = ()
    transport: str | None = DEFAULT_TRANSPORT
    layers: str | None = None
    config_out: Path | None = None
    discovery: Discovery = "static"
    discovery_timeout: float = 60.0
    discovery_port: int = BEACON_PORT
    discovery_target: str = "255.255.255.255"
    http: bool = True
    heartbeat_grace: float = 5.0
    dry_run: bool = False
    notices: tuple[str, ...] = ()

    @property
    def places(self) -> int:
        """How many peers the cluster needs."""
        return self.stages * self.tensor.size

    @property
    def is_peer(self) -> bool:
        """Whether this node holds a stage."""
        return self.mode.startswith("peer")

    @property
    def is_coordinator(self) -> bool:
        """Whether this node serves HTTP and lets others hold the stages."""
        return self.mode.startswith("coordinator")

    def config_path(self, node: str) -> Path:
        """Where the node with this id writes the TOML."""
        name = f"cluster-{node}.toml" if self.is_peer else "cluster.toml"
        return (self.config_out or CONFIG_FOLDER / name).absolute()
