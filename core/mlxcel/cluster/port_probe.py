"""Whether a port could be had, without having it."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Literal

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.handshake import HELLO_SIZE, OtherVersion, read_hello
from mlxcel.cluster.introduction import PROTOCOL_VERSION
from mlxcel.errors import ClusterVersionError, WireError

HELLO_SECONDS = 2.0
"""How long a peer may take to say its hello."""

PortState = Literal["free", "elsewhere", "peer"]


def port_state(address: Address) -> PortState | OSError:
    """Whether ``address`` is free, of another machine, or a peer's; else why it cannot be had.

    Nothing listens, and nothing is sent. Only an address of this machine is ever dialled.

    Raises:
        ClusterVersionError: A node of another protocol version listens there.
    """
    try:
        try_bind(address)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            return "elsewhere"
        if error.errno == errno.EADDRINUSE and _says_hello(address):
            return "peer"
        return error
    return "free"


def try_bind(address: Address) -> None:
    """Bind to ``address`` and let go of it.

    Raises:
        OSError: It cannot be had.
    """
    family, kind, _, _, place = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    )[0]
    with socket.socket(family, kind) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as listeners do
        sock.bind(place)


def _says_hello(address: Address) -> bool:
    hello = b""
    with contextlib.suppress(OSError), _connected(address) as sock:
        while len(hello) < HELLO_SIZE and (piece := sock.recv(HELLO_SIZE - len(hello))):
            hello += piece
    try:
        read_hello(hello)
    except OtherVersion as other:
        raise ClusterVersionError(
            ((str(address), f"protocol {other.version}"),), f"protocol {PROTOCOL_VERSION}"
        ) from other
    except WireError:
        return False
    return True


def _connected(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), HELLO_SECONDS)
