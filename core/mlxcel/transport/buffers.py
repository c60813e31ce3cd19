"""Room in a socket for what its peer has not taken yet."""

from __future__ import annotations

import contextlib
import socket

WANTED = 1 << 20
"""Bytes asked for in each direction; a system that gives less is asked for less."""

LEAST = 64 << 10


def widen(sock: socket.socket) -> None:
    """Let ``sock`` hold much that is on its way, as far as the system allows.

    For sockets whose two ends may both be sending before either receives, and for Unix sockets,
    which hold 8 KiB on some systems. It fixes what TCP would otherwise fit to the distance, so
    it is not for long ways.
    """
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        size = WANTED
        while size >= LEAST and sock.getsockopt(socket.SOL_SOCKET, option) < size:
            # Linux cuts what is too much, other systems refuse it.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, size)
            size //= 2


def room(sock: socket.socket) -> int:
    """The bytes that ``sock`` takes for sure while its peer takes none.

    Half of its smaller buffer: the system's bookkeeping counts too.
    """
    return (
        min(
            sock.getsockopt(socket.SOL_SOCKET, option)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF)
        )
        // 2
    )
