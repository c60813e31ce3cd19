"""Sockets in the event loop: what gate, dial and control channel share.

Sockets, not streams, because a session's socket goes on to a thread or another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import Any

PIECE = 16 << 10


async def read_up_to(sock: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes; fewer if the other end closes before. Memory grows as they come.

    Raises:
        OSError: The connection broke.
    """
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        piece = await loop.sock_recv(sock, min(size - len(data), PIECE))
        if not piece:
            break
        data += piece
    return bytes(data)


async def read_exactly(sock: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes.

    Raises:
        EOFError: The other end closes before.
        OSError: The connection broke.
    """
    data = await read_up_to(sock, size)
    if len(data) < size:
        raise EOFError("it was closed by the other end too early")
    return data


def name_of(address: Any) -> str:
    """``host:port`` of a socket's address, an IPv6 host in brackets."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reason_of(error: BaseException) -> str:
    """What went wrong with a connection, without numbers that only programs know."""
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)  # its own words may repeat the address as Python has it
    return getattr(error, "strerror", None) or str(error)


def has_expired(error: BaseException) -> bool:
    """Whether a deadline of this process has passed.

    A connection that the system gives up (ETIMEDOUT) is a TimeoutError too, after any time.
    """
    return isinstance(error, TimeoutError) and error.errno is None


def hang_up(sock: socket.socket) -> None:
    """End the connection for both ends and close the socket; harmless when repeated."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def reset(sock: socket.socket) -> None:
    """Close the socket so that the other end sees an error, not an end: it may try again."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
