"""Options of TCP sockets that a cluster's connections want."""

from __future__ import annotations

import contextlib
import socket


def set_tcp_options(sock: socket.socket) -> None:
    """Send small frames at once, and let the system notice a peer that has vanished.

    Sockets of other families, such as Unix pairs, stay as they are.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A vanished machine is noticed after some 25 s of silence; not every system has each option.
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPALIVE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
    ):
        if (option := getattr(socket, name, None)) is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
