"""Frames in the clear, for processes of one machine and for benches."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence

from mlxcel.errors import WireError
from mlxcel.transport.buffers import widen
from mlxcel.transport.contract import TransportOptions
from mlxcel.transport.framed import FramedConnection
from mlxcel.transport.memory import allocate
from mlxcel.wire.tensor import Buffer, flat

_LENGTH = struct.Struct("<Q")
_SMALL = 64 << 10


class PlainConnection(FramedConnection):
    """A :class:`~mlxcel.transport.Connection` whose frames are a u64 length, then that many bytes.

    Small frames are joined, large ones are not copied.
    """

    def __init__(
        self, sock: socket.socket, peer: str, options: TransportOptions | None = None
    ) -> None:
        if sock.family == socket.AF_UNIX:
            widen(sock)
        super().__init__(sock, peer, options or TransportOptions(), _LENGTH.size, _SMALL)

    def _make(self, pieces: Sequence[Buffer]) -> Iterator[Buffer]:
        views = [flat(piece) for piece in pieces]
        total = sum(map(len, views))
        header = _LENGTH.pack(total)
        if total <= _SMALL:
            yield b"".join([header, *views])
        else:
            yield header
            yield from views

    def _read(self, header: bytes) -> memoryview:
        (length,) = _LENGTH.unpack(header)
        if length > self._max_frame:
            raise WireError(f"a frame of {length} bytes; {self._max_frame} are allowed")
        self._stream.skip(_LENGTH.size)
        frame = allocate(length) if length > _SMALL else memoryview(bytearray(length))
        self._stream.read_into(frame)
        return frame
