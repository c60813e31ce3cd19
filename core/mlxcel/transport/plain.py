"""Frames in the clear, for processes of one machine and for benches."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence

from mlxcel.errors import MlxcelError, WireError
from mlxcel.transport.buffers import widen
from mlxcel.transport.contract import TransportOptions
from mlxcel.transport.memory import allocate
from mlxcel.transport.stream import ByteStream
from mlxcel.wire.tensor import Buffer, flat

_LENGTH = struct.Struct("<Q")
_SMALL = 64 << 10


class PlainConnection:
    """A :class:`Connection` whose frames are a u64 length, then that many bytes."""

    def __init__(
        self, sock: socket.socket, peer: str, options: TransportOptions | None = None
    ) -> None:
        options = options or TransportOptions()
        if sock.family == socket.AF_UNIX:
            widen(sock)
        self.peer = peer
        self._max_frame = options.max_frame
        self._stream = ByteStream(sock, peer, options, _SMALL)

    @property
    def sent(self) -> int:
        """Bytes sent, lengths included."""
        return self._stream.sent

    @property
    def received(self) -> int:
        """Bytes received, lengths included."""
        return self._stream.received

    @property
    def room(self) -> int:
        """Bytes that a send takes while the peer takes none."""
        return self._stream.room

    def send(self, pieces: Sequence[Buffer], timeout: float) -> None:
        """See :meth:`Connection.send`; small frames are joined, large ones are not copied."""
        try:
            self._stream.send(_parts(pieces), timeout)
        except MlxcelError:
            self.close()  # a part of it may be on its way
            raise

    def receive(self, timeout: float | None) -> memoryview | None:
        """See :meth:`Connection.receive`."""
        begun = False
        try:
            header = self._stream.need(_LENGTH.size, timeout, begins=True)
            if not header:
                return None
            begun = True
            (length,) = _LENGTH.unpack(header)
            if length > self._max_frame:
                raise WireError(f"a frame of {length} bytes; {self._max_frame} are allowed")
            self._stream.skip(_LENGTH.size)
            frame = allocate(length) if length > _SMALL else memoryview(bytearray(length))
            self._stream.read_into(frame)
        except MlxcelError:
            if begun:
                self.close()
            raise
        return frame

    def close(self) -> None:
        """See :meth:`Connection.close`."""
        self._stream.close()


def _parts(pieces: Sequence[Buffer]) -> Iterator[Buffer]:
    views = [flat(piece) for piece in pieces]
    total = sum(map(len, views))
    header = _LENGTH.pack(total)
    if total <= _SMALL:
        yield b"".join([header, *views])
    else:
        yield header
        yield from views
