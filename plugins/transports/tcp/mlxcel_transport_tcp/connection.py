"""A connection whose frames nobody on the way can read or change."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

from mlxcel.errors import MlxcelError
from mlxcel.transport import Buffer, ByteStream, Keys, TransportOptions, allocate
from mlxcel.wire.sealed import CHUNK, HEADER, TAG, Opener, Sealer, chunk_sizes, frame_length

_LARGE = 32 << 10
"""From here on filling a frame with zeros takes longer than having it made elsewhere."""


class SealedConnection:
    """See :class:`mlxcel.transport.Connection`.

    A frame of one chunk is one system call at each end. A larger one is encrypted and sent,
    received and decrypted chunk by chunk, so that both ends and the network work at once.
    """

    def __init__(
        self, sock: socket.socket, keys: Keys, peer: str, options: TransportOptions
    ) -> None:
        self.peer = peer
        self._max_frame = options.max_frame
        self._sealer = Sealer(keys.send)
        self._sealing = threading.Lock()  # even if two threads send, no nonce is used twice
        self._opener = Opener(keys.receive)
        self._stream = ByteStream(sock, peer, options, HEADER + CHUNK + TAG)
        self._first = memoryview(bytearray(CHUNK))  # of a frame that has more

    @property
    def sent(self) -> int:
        """Bytes sent, headers and tags included."""
        return self._stream.sent

    @property
    def received(self) -> int:
        """Bytes received, headers and tags included."""
        return self._stream.received

    @property
    def room(self) -> int:
        """Bytes that a send takes while the peer takes none."""
        return self._stream.room

    def send(self, pieces: Sequence[Buffer], timeout: float) -> None:
        """See :meth:`mlxcel.transport.Connection.send`."""
        try:
            with self._sealing:
                self._stream.send(self._sealer.seal(pieces), timeout)
        except MlxcelError:
            self.close()  # the frame is cut off
            raise

    def receive(self, timeout: float | None) -> memoryview | None:
        """See :meth:`mlxcel.transport.Connection.receive`."""
        begun = False
        try:
            head = self._stream.need(HEADER, timeout, begins=True)
            if not head:
                return None
            begun = True
            return self._frame(bytes(head))
        except MlxcelError:
            if begun:
                self.close()
            raise

    def _frame(self, header: bytes) -> memoryview:
        """The frame that begins with ``header``, which is still in the stream."""
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

    def close(self) -> None:
        """See :meth:`mlxcel.transport.Connection.close`."""
        self._stream.close()
