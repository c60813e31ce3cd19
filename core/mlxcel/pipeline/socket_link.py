"""The two ends of a link over a stream socket.

The sending end writes from the stage's own thread. The receiving end has a thread that
touches bytes only and keeps the socket empty, so a sender is never held up by a stage that
computes; the queue behind it is bounded by the credits.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import attrs

from mlxcel.errors import ChannelClosed, DeadlineError, MlxcelError
from mlxcel.pipeline.channel import Channel
from mlxcel.pipeline.step import Message, Step
from mlxcel.wire import message as wire_message
from mlxcel.wire.frame import receive_frame, send_frame


class SocketOutbox:
    """The sending end.

    Args:
        sock: Connected; the outbox closes it.
        name: Of the link, for errors.
        timeout: Seconds that one send may take.
        to_wire: Makes a :class:`WireTensor` of an array; called in the sender's thread.
    """

    def __init__(
        self, sock: socket.socket, name: str, timeout: float, to_wire: Callable[[Any], Any]
    ) -> None:
        self._sock = sock
        self._name = name
        self._timeout = timeout
        self._to_wire = to_wire
        self._reason: str | None = None
        sock.settimeout(timeout)

    def send(self, message: Message) -> None:
        """Write ``message``.

        Raises:
            ChannelClosed: The other end is gone.
            DeadlineError: The other end took nothing within the deadline.
        """
        if isinstance(message, Step):
            tensors = {name: self._to_wire(value) for name, value in message.tensors.items()}
            message = attrs.evolve(message, tensors=tensors)
        try:
            send_frame(self._sock, wire_message.pieces(message))
        except TimeoutError:
            raise DeadlineError(
                self._name,
                "a message to be taken",
                self._timeout,
                "Look at the receiving stage's log, or give it more time with --pp-timeout.",
            ) from None
        except OSError as error:
            raise ChannelClosed(self._name, self._reason or str(error)) from error

    def close(self, reason: str | None = None) -> None:
        """Close the connection; harmless when repeated."""
        self._reason = self._reason or reason
        _close(self._sock)


class SocketInbox:
    """The receiving end.

    Args:
        sock: Connected; the inbox closes it.
        name: Of the link, for errors.
        capacity: Messages that may wait.
    """

    def __init__(self, sock: socket.socket, name: str, capacity: int) -> None:
        self._sock = sock
        self._channel: Channel[Message] = Channel(capacity, name)
        sock.settimeout(None)  # the reader waits for as long as the peer lives; receive() does not
        threading.Thread(target=self._read, name=f"mlxcel-read {name}", daemon=True).start()

    def receive(self, timeout: float) -> Message:
        """The next message; see :meth:`mlxcel.pipeline.link.Link.receive`."""
        return self._channel.get(timeout)

    def poll(self) -> Message | None:
        """The next message if it has arrived; see :meth:`mlxcel.pipeline.link.Inbox.poll`."""
        return self._channel.poll()

    def listen(self, listener: Callable[[], None]) -> None:
        """See :meth:`mlxcel.pipeline.link.Inbox.listen`."""
        self._channel.listen(listener)

    def take_hops(self) -> tuple[float, ...]:
        """See :meth:`mlxcel.pipeline.link.Inbox.take_hops`."""
        return ()

    def close(self, reason: str | None = None) -> None:
        """Close the connection; what has arrived can still be received."""
        self._channel.close(reason)
        _close(self._sock)

    def _read(self) -> None:
        reason = "the other end has closed it"
        try:
            while (frame := receive_frame(self._sock)) is not None:
                self._channel.put(wire_message.decode(frame))
        except (MlxcelError, OSError) as error:
            reason = str(error)
        finally:
            self.close(reason)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in recv
    sock.close()
