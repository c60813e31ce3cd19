"""What a coordinator would do, found out without doing it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.assign import assign
from mlxcel.cluster.discovery import find_peers, version_error
from mlxcel.cluster.options import ClusterOptions
from mlxcel.cluster.port_probe import port_state, try_bind
from mlxcel.cluster.topology import COORDINATOR, Topology
from mlxcel.cluster.topology_toml import emit_topology, write_topology
from mlxcel.errors import AddressError, ListenError, PortTaken


@attrs.frozen
class DryRun:
    """What came out: the cluster, the file that describes it, and lines for the operator."""

    topology: Topology
    path: Path
    notices: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.topology.describe()}\nEmitted cluster TOML at: {self.path}"


def dry_run(
    options: ClusterOptions, http: Address, say: Callable[[str], None] = lambda line: None
) -> DryRun:
    """Find and assign the peers, check the ports, and write the TOML.

    Args:
        http: Where the coordinator would serve HTTP.
        say: See :func:`mlxcel.cluster.discovery.find_peers`.

    Raises:
        MlxcelError: The cluster could not start; no file is written.
    """
    found = find_peers(options, say)
    if found.conflicts:
        raise version_error(found.conflicts)
    assignment = assign(options, found.peers)
    topology = assignment.topology
    notices = [f"not used, a spare: {address}" for address in assignment.spares]
    _check_own_ports(http, options)
    for node in topology.stages:
        state = port_state(node.address)
        if isinstance(state, OSError):
            raise PortTaken(
                f"{node.address}, where {node.id} would listen,",
                f"no mlxcel peer answers there ({state.strerror or state})",
                "Stop what uses the port, or list another address for the peer.",
            )
        if state == "free":
            notices.append(f"no peer listens on {node.address} yet")
    path = options.config_path(COORDINATOR)
    write_topology(path, emit_topology(topology))
    return DryRun(topology, path, tuple(notices))


def _check_own_ports(http: Address, options: ClusterOptions) -> None:
    try:
        try_bind(http)
    except OSError as error:
        raise AddressError(http.host, http.port, error.strerror or str(error)) from error
    assert options.control is not None, "a coordinator has an address"
    try:
        try_bind(options.control)
    except OSError as error:
        raise ListenError(str(options.control), error.strerror or str(error)) from error
