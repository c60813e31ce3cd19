"""Bytes over a connected socket, for threads: deadlines, a little spinning, and a close that wakes.

What every connection over a stream socket is built on, sealed or not.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterable

from mlxcel.errors import ChannelClosed, DeadlineError
from mlxcel.transport.buffers import room
from mlxcel.transport.contract import TransportOptions
from mlxcel.wire.tensor import Buffer

HERE = "it was closed here"


class ByteStream:
    """One socket; one thread may send while one receives, and any may close.

    Args:
        sock: Connected; the stream closes it.
        peer: Who is at the other end, for errors.
        options: How long to spin, and how long a peer may stand still within a frame.
        buffer: The largest number of bytes that :meth:`need` can be asked for.

    Attributes:
        sent, received: Bytes so far.
        room: Bytes that a send takes while the peer takes none.
    """

    def __init__(
        self, sock: socket.socket, peer: str, options: TransportOptions, buffer: int
    ) -> None:
        self.peer = peer
        self.sent = 0
        self.received = 0
        self.room = room(sock)
        self._sock = sock
        self._spin = options.spin
        self._stall = options.stall
        self._buffer = memoryview(bytearray(buffer))
        self._start = self._stop = 0  # what has arrived and was not taken
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._closed = False
        sock.setblocking(False)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def send(self, parts: Iterable[Buffer], timeout: float) -> None:
        """Send ``parts``, each asked for when the one before is on its way.

        Raises:
            DeadlineError: Not all was taken within ``timeout`` seconds.
            ChannelClosed: The connection is gone.
        """
        until = time.monotonic() + timeout
        with self._sending:
            for part in parts:
                while part := self._send(part, until, timeout):
                    pass

    def _send(self, part: Buffer, until: float, timeout: float) -> Buffer:
        """Send what the system takes of ``part`` by ``until``; returns what it did not take."""
        try:
            count = self._sock.send(part)
        except BlockingIOError:
            if _wait(self._writable, until - time.monotonic()):
                return part
            raise DeadlineError(
                self.peer,
                "a message to be taken",
                timeout,
                "It hangs or is overloaded; look at its log, or allow more time with --pp-timeout.",
            ) from None
        except OSError as error:
            raise self._gone(error) from error
        self.sent += count
        return memoryview(part)[count:]

    def need(self, size: int, timeout: float | None = None, begins: bool = False) -> memoryview:
        """The next ``size`` bytes, which stay to be taken with :meth:`skip`.

        The view is valid until the next call. It is empty when the peer closes before the
        first of them and a frame ``begins``.

        Args:
            timeout: Seconds to wait for the first byte where a frame begins; None waits as long
                as the connection lives. Within a frame the peer may stand still for
                ``options.stall`` seconds.

        Raises:
            DeadlineError: Nothing came in time.
            ChannelClosed: The connection broke, or ended within a frame.
        """
        if self._closed:
            raise ChannelClosed(self.peer, HERE)
        if self._start + size > len(self._buffer):
            rest = self._stop - self._start
            self._buffer[:rest] = self._buffer[self._start : self._stop]
            self._start, self._stop = 0, rest
        while (have := self._stop - self._start) < size:
            fresh = begins and not have
            count = self._receive(
                self._buffer[self._stop :], timeout if fresh else self._stall, fresh
            )
            if not count:
                if fresh:
                    return self._buffer[:0]
                raise ChannelClosed(self.peer, "it ended within a message")
            self._stop += count
        return self._buffer[self._start : self._start + size]

    def skip(self, size: int) -> None:
        """Take ``size`` bytes that :meth:`need` has shown."""
        self._start += size
        if self._start == self._stop:
            self._start = self._stop = 0

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes, which are within a frame.

        Raises:
            DeadlineError, ChannelClosed: As :meth:`need`.
        """
        here = min(len(view), self._stop - self._start)
        view[:here] = self._buffer[self._start : self._start + here]
        self.skip(here)
        while here < len(view):
            count = self._receive(view[here:], self._stall, False)
            if not count:
                raise ChannelClosed(self.peer, "it ended within a message")
            here += count

    def _receive(self, view: memoryview, timeout: float | None, begins: bool) -> int:
        """Whatever arrives next, into ``view``; 0 at the end of the stream."""
        with self._receiving:
            begun = time.monotonic()
            while True:
                try:
                    count = self._sock.recv_into(view)
                except BlockingIOError:
                    spent = time.monotonic() - begun
                    if spent < self._spin or _wait(
                        self._readable, None if timeout is None else timeout - spent
                    ):
                        continue
                    raise DeadlineError(
                        self.peer,
                        "the next message" if begins else "the rest of a message",
                        timeout or 0.0,
                        "It hangs or is slower than that; look at its log, or allow more time "
                        "with --pp-timeout.",
                    ) from None
                except OSError as error:
                    raise self._gone(error) from error
                if not count and self._closed:
                    raise ChannelClosed(self.peer, HERE)
                self.received += count
                return count

    def _gone(self, error: OSError) -> ChannelClosed:
        return ChannelClosed(self.peer, HERE if self._closed else error.strerror or str(error))

    def close(self) -> None:
        """End the connection and wake whoever waits in it; harmless when repeated."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        # The number of a closed socket may be another's at once, so nobody may still wait on it.
        with self._sending, self._receiving:
            self._sock.close()


def _wait(poll: select.poll, seconds: float | None) -> bool:
    """Whether the socket became ready (or broke) within ``seconds``."""
    if seconds is None:
        return bool(poll.poll())
    return seconds > 0 and bool(poll.poll(seconds * 1000 + 1))
