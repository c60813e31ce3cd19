"""A connection whose frames nobody on the way can read or change."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

from mlxcel.transport import Buffer, FramedConnection, Keys, TransportOptions, allocate
from mlxcel.wire.sealed import CHUNK, HEADER, TAG, Opener, Sealer, chunk_sizes, frame_length

_LARGE = 32 << 10
"""From here on filling a frame with zeros takes longer than having it made elsewhere."""


class SealedConnection(FramedConnection):
    """A :class:`mlxcel.transport.Connection` whose frames are sealed.

    A frame of one chunk is one system call at each end. A larger one is encrypted and sent,
    received and decrypted chunk by chunk, so that both ends and the network work at once.
    """

    def __init__(
        self, sock: socket.socket, keys: Keys, peer: str, options: TransportOptions
    ) -> None:
        super().__init__(sock, peer, options, HEADER, HEADER + CHUNK + TAG)
        self._sealer = Sealer(keys.send)
        self._opener = Opener(keys.receive)
        self._first = memoryview(bytearray(CHUNK))  # of a frame that has more

    def _make(self, pieces: Sequence[Buffer]) -> Iterable[Buffer]:
        return self._sealer.seal(pieces)

    def _read(self, header: bytes) -> memoryview:
        length = frame_length(header, self._max_frame)
        sizes = chunk_sizes(length)
        size = next(sizes)
        sealed = self._stream.need(HEADER + size + TAG)[HEADER:]
        if size == length:
            frame = memoryview(bytearray(length)) if length < _LARGE else allocate(length)
            self._opener.open_into(header, sealed, frame)
            self._stream.skip(HEADER + size + TAG)
            return frame
        first = self._first[:size]
        self._opener.open_into(header, sealed, first)
        self._stream.skip(HEADER + size + TAG)
        # Only now is it sure that the length is the peer's and nobody else's.
        frame = allocate(length)
        frame[:size] = first
        start = size
        for size in sizes:
            sealed = self._stream.need(size + TAG)
            self._opener.open_into(header, sealed, frame[start : start + size])
            self._stream.skip(size + TAG)
            start += size
        return frame
