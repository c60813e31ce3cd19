"""Where a rank is reached by the others of its stage, where MLX connects them by itself."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from mlxcel.cluster.messages import Offer
from mlxcel.cluster.sockets import reason_of
from mlxcel.cluster.topology_toml import parse_topology
from mlxcel.errors import ListenError


def fabric_address(offer: Offer) -> str:
    """The IP address that the cluster's TOML has for the node, and a port that is free now.

    Empty where collectives go over the cluster's own connections. Blocks while a name is looked
    up.

    Raises:
        ListenError: The address is none of this machine's.
        MlxcelError: The offered TOML cannot be read.
    """
    if offer.collectives == "transport":
        return ""
    node = parse_topology(offer.topology, "the offered TOML").node(offer.node)
    assert node is not None, "the offer has been judged"
    try:
        with socket.socket(socket.AF_INET) as sock:  # MLX knows IPv4 only
            sock.bind((_reachable(node.address.host), 0))
            host, port = sock.getsockname()
    except OSError as error:
        raise ListenError(node.address.host, reason_of(error)) from error
    return f"{host}:{port}"


def _reachable(name: str) -> str:
    """The first IPv4 address of ``name`` that other machines may reach; else the first one.

    A machine's own name is often a loopback address to itself.

    Raises:
        OSError: The name has none.
    """
    found = socket.getaddrinfo(name, 0, socket.AF_INET, socket.SOCK_STREAM)
    hosts = [str(entry[4][0]) for entry in found]
    return next((host for host in hosts if not ip_address(host).is_loopback), hosts[0])
