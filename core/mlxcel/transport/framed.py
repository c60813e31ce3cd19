"""What connections over a stream socket have in common, however their frames look."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from mlxcel.transport.contract import TransportOptions
from mlxcel.transport.stream import ByteStream
from mlxcel.wire.tensor import Buffer


class FramedConnection(ABC):
    """A :class:`~mlxcel.transport.Connection` over a :class:`ByteStream`.

    A subclass says what the bytes of a frame are. A frame that is cut off, or not what it must
    be, closes the connection: nothing that follows could be understood.

    Args:
        header: The bytes that every frame begins with.
        buffer: The largest number of bytes that :meth:`_read` looks at before it takes them.
    """

    def __init__(
        self, sock: socket.socket, peer: str, options: TransportOptions, header: int, buffer: int
    ) -> None:
        self.peer = peer
        self._max_frame = options.max_frame
        self._header = header
        self._stream = ByteStream(sock, peer, options, buffer)
        self._framing = threading.Lock()  # frames are made and sent in one order

    @abstractmethod
    def _make(self, pieces: Sequence[Buffer]) -> Iterable[Buffer]:
        """The bytes of the frame of ``pieces``; all are asked for, one after the other."""

    @abstractmethod
    def _read(self, header: bytes) -> memoryview:
        """What the frame holds that begins with ``header``, which is still in the stream."""

    @property
    def sent(self) -> int:
        """Bytes sent, those of the frames' own included."""
        return self._stream.sent

    @property
    def received(self) -> int:
        """Bytes received, those of the frames' own included."""
        return self._stream.received

    @property
    def room(self) -> int:
        """Bytes that a send takes while the peer takes none."""
        return self._stream.room

    def send(self, pieces: Sequence[Buffer], timeout: float) -> None:
        """See :meth:`mlxcel.transport.Connection.send`."""
        try:
            with self._framing:
                self._stream.send(self._make(pieces), timeout)
        except BaseException:
            self.close()  # a part of it may be on its way
            raise

    def receive(self, timeout: float | None) -> memoryview | None:
        """See :meth:`mlxcel.transport.Connection.receive`."""
        begun = False
        try:
            header = self._stream.need(self._header, timeout, begins=True)
            if not header:
                return None
            begun = True
            return self._read(bytes(header))
        except BaseException:
            if begun:
                self.close()
            raise

    def close(self) -> None:
        """See :meth:`mlxcel.transport.Connection.close`."""
        self._stream.close()
