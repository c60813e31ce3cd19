"""Listening at a name, which may stand for several addresses of this machine."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.sockets import name_of

BACKLOG = 1024

CHOICES = 5
"""How many ports to try where any will do."""

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""An address that a name has, and this machine not (any more), such as ``::1`` without IPv6."""

Found = Sequence[tuple[Any, ...]]
"""What :func:`socket.getaddrinfo` returns."""


def open_listeners(found: Found) -> list[socket.socket]:
    """Non-blocking sockets that listen at all addresses of ``found`` that are this machine's.

    All have one port; if it is 0, the system chooses it for the first one, and another if that one
    is in use at the next address.

    Raises:
        OSError: One is in use, or none is this machine's.
    """
    for _ in range(CHOICES - 1):
        try:
            return _open(found)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or any(entry[4][1] for entry in found):
                raise
    return _open(found)


def _open(found: Found) -> list[socket.socket]:
    port, missing = 0, None
    with ExitStack() as stack:
        listeners: list[socket.socket] = []
        for family, where in dict.fromkeys((entry[0], entry[4]) for entry in found):
            host, given, *scope = where
            try:
                listener = socket.create_server(
                    (host, given or port, *scope), family=family, backlog=BACKLOG
                )
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
                continue
            listeners.append(stack.enter_context(listener))
            listener.setblocking(False)
            port = listener.getsockname()[1]
        if not listeners and missing is not None:
            raise missing
        stack.pop_all()
        return listeners


def doubtful(address: Address, listeners: Sequence[socket.socket]) -> str | None:
    """What to tell an operator whose name for this machine leads nobody else to it."""
    if address.is_loopback:
        return None
    places = [listener.getsockname() for listener in listeners]
    if not all(ipaddress.ip_address(host.partition("%")[0]).is_loopback for host, *_ in places):
        return None
    return (
        f"on this machine {address.host!r} is {' and '.join(map(name_of, places))} only, where no "
        f"other machine can reach it: give --cluster-control-addr an IP address"
    )
