"""The flags that make ``mlxcel serve`` a part of a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlxcel.cluster.options import BEACON_PORT, ClusterOptions
from mlxcel.cluster.topology import DEFAULT_NAME, DEFAULT_TRANSPORT
from mlxcel.plugins import Plugins

CONTROL_PORT = 19000
_DEFAULTS = ClusterOptions()


def add_cluster_flags(group: argparse._ActionsContainer) -> None:
    """What makes the command a coordinator or a peer."""
    group.add_argument(
        "--pp-auto", type=int, metavar="N", help="coordinate N stages, each on a peer, or each rank"
    )
    group.add_argument(
        "--pp-peer", action="store_true", help="hold a stage for a coordinator (-m: repeatable)"
    )
    group.add_argument(
        "--distributed-config", type=Path, metavar="FILE", help="the cluster's TOML, by hand"
    )
    group.add_argument("--node-id", metavar="ID", help="which node of that file this is")
    group.add_argument("--node-role", metavar="ROLE", help="its role, to be sure")
    group.add_argument("--peers", metavar="A,B", help="the nodes' addresses, to be sure")
    group.add_argument(
        "--cluster-name",
        default=DEFAULT_NAME,
        metavar="NAME",
        help=f"only nodes of one name find each other ({DEFAULT_NAME})",
    )
    group.add_argument(
        "--cluster-peers", metavar="A,B", help="where the peers listen, HOST:PORT each"
    )
    group.add_argument(
        "--cluster-control-addr",
        metavar="HOST:PORT",
        help=f"where a peer listens, and what a coordinator is called (HOST:{CONTROL_PORT})",
    )
    group.add_argument(
        "--cluster-secret-file", type=Path, metavar="FILE", help="the secret that all nodes share"
    )
    group.add_argument(
        "--cluster-config-out",
        type=Path,
        metavar="FILE",
        help="where the cluster's TOML is written (.mlxcel/cluster.toml)",
    )
    group.add_argument(
        "--transport-backend",
        default=DEFAULT_TRANSPORT,
        metavar="NAME",
        help=f"what carries the data: {', '.join(_transports())} ({DEFAULT_TRANSPORT})",
    )
    group.add_argument(
        "--cluster-heartbeat-grace",
        type=float,
        default=_DEFAULTS.heartbeat_grace,
        metavar="SECONDS",
        help="silence after which a node is lost (5), or a worker process where there is no "
        "cluster (10)",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="write the TOML, say what would start, and end"
    )


def add_discovery_flags(group: argparse._ActionsContainer) -> None:
    """How a coordinator finds peers that it is not told."""
    group.add_argument(
        "--cluster-discovery",
        default="static",
        choices=["static", "mdns"],
        help="peers from --cluster-peers, or by their signed beacons (static)",
    )
    group.add_argument(
        "--cluster-discovery-timeout",
        type=float,
        default=_DEFAULTS.discovery_timeout,
        metavar="SECONDS",
        help="longest wait for peers (60)",
    )
    group.add_argument(
        "--cluster-discovery-port",
        type=int,
        default=BEACON_PORT,
        metavar="N",
        help=f"UDP port of the beacons ({BEACON_PORT})",
    )
    group.add_argument(
        "--cluster-discovery-target",
        default=_DEFAULTS.discovery_target,
        metavar="HOST",
        help="where a peer sends its beacons (255.255.255.255)",
    )


def _transports() -> tuple[str, ...]:
    return Plugins.discover().names("transport")
