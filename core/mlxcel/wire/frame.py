"""Frames on a stream socket: a length, then that many bytes.

The length is a little-endian u64, checked against a cap before anything is allocated.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from mlxcel.errors import WireError
from mlxcel.wire.tensor import MAX_BYTES, Buffer

MAX_FRAME = MAX_BYTES + (64 << 20)
"""The largest frame that is accepted: one tensor of the largest size and its header."""

_LENGTH = struct.Struct("<Q")
_SMALL = 64 << 10


def send_frame(sock: socket.socket, pieces: Sequence[Buffer]) -> None:
    """Send ``pieces`` as one frame; small ones are joined, large ones are not copied.

    Raises:
        OSError: The socket's deadline has passed (TimeoutError), or the peer is gone.
    """
    total = sum(_size(piece) for piece in pieces)
    if total <= _SMALL:
        sock.sendall(b"".join([_LENGTH.pack(total), *pieces]))
        return
    sock.sendall(_LENGTH.pack(total))
    for piece in pieces:
        sock.sendall(piece)


def receive_frame(sock: socket.socket, max_bytes: int = MAX_FRAME) -> memoryview | None:
    """The next frame, or None when the peer has closed between two frames.

    Raises:
        WireError: The frame is larger than ``max_bytes``, or the stream ends within it.
        OSError: The socket's deadline has passed, or the connection broke.
    """
    prefix = bytearray(_LENGTH.size)
    got = _receive_into(sock, memoryview(prefix))
    if got == 0:
        return None
    if got < _LENGTH.size:
        raise WireError("the stream ends within a frame's length")
    (length,) = _LENGTH.unpack(prefix)
    if length > max_bytes:
        raise WireError(f"a frame of {length} bytes; {max_bytes} are allowed")
    view = memoryview(bytearray(length))
    if _receive_into(sock, view) < length:
        raise WireError("the stream ends within a frame")
    return view


def _receive_into(sock: socket.socket, view: memoryview) -> int:
    """Fill ``view``; returns how many bytes came before the stream ended."""
    got = 0
    while got < len(view):
        count = sock.recv_into(view[got:])
        if count == 0:
            break
        got += count
    return got


def _size(piece: Buffer) -> int:
    return piece.nbytes if isinstance(piece, memoryview) else len(piece)
