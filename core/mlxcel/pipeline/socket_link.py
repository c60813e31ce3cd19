"""The two ends of a link over a connection, whatever transport made that.

The sending end writes from the stage's own thread. The receiving end has a thread that
touches bytes only and keeps the connection empty, so a sender is never held up by a stage that
computes; the queue behind it is bounded by the credits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from mlxcel.errors import ChannelClosed, DeadlineError, MlxcelError
from mlxcel.pipeline.channel import Channel
from mlxcel.pipeline.step import Message, Step
from mlxcel.transport.contract import Connection
from mlxcel.wire import message as wire_message

MOST_HOPS = 64
"""How many hop times an inbox keeps; of more, the latest."""


class ConnectionOutbox:
    """The sending end.

    Args:
        connection: The outbox closes it.
        name: Of the link, for errors.
        timeout: Seconds that one send may take.
        to_wire: Makes a :class:`WireTensor` of an array; called in the sender's thread.
    """

    def __init__(
        self, connection: Connection, name: str, timeout: float, to_wire: Callable[[Any], Any]
    ) -> None:
        self._connection = connection
        self._name = name
        self._timeout = timeout
        self._to_wire = to_wire
        self._reason: str | None = None

    @property
    def sent(self) -> int:
        """Bytes on the wire so far."""
        return self._connection.sent

    def send(self, message: Message) -> None:
        """Write ``message``.

        Raises:
            ChannelClosed: The other end is gone.
            DeadlineError: The other end took nothing within the deadline.
        """
        if isinstance(message, Step):
            tensors = {name: self._to_wire(value) for name, value in message.tensors.items()}
            message = attrs.evolve(message, tensors=tensors)
        pieces = wire_message.pieces(message, time.monotonic_ns())
        try:
            self._connection.send(pieces, self._timeout)
        except DeadlineError:
            raise DeadlineError(
                self._name,
                "a message to be taken",
                self._timeout,
                "Look at the receiving stage's log, or give it more time with --pp-timeout.",
            ) from None
        except ChannelClosed as closed:
            raise ChannelClosed(self._name, self._reason or closed.reason) from closed

    def close(self, reason: str | None = None) -> None:
        """Close the connection; harmless when repeated."""
        self._reason = self._reason or reason
        self._connection.close()


class ConnectionInbox:
    """The receiving end.

    Args:
        connection: The inbox closes it.
        name: Of the link, for errors.
        capacity: Messages that may wait.
        patient: Whether more may come than that. What finds no place stays in the connection,
            and at last holds up the sender.
    """

    def __init__(
        self, connection: Connection, name: str, capacity: int, *, patient: bool = False
    ) -> None:
        self._connection = connection
        self._patient = patient
        self._channel: Channel[Message] = Channel(capacity, name)
        self._hops: deque[float] = deque(maxlen=MOST_HOPS)
        threading.Thread(target=self._read, name=f"mlxcel-read {name}", daemon=True).start()

    @property
    def received(self) -> int:
        """Bytes on the wire so far."""
        return self._connection.received

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
        taken = []
        while self._hops:  # the reader's thread may append meanwhile
            taken.append(self._hops.popleft())
        return tuple(taken[:MOST_HOPS])

    def close(self, reason: str | None = None) -> None:
        """Close the connection; what has arrived can still be received."""
        self._channel.close(reason)
        self._connection.close()

    def _read(self) -> None:
        reason = "the other end has closed it"
        try:
            # The reader waits for as long as the peer lives; receive() does not.
            while (frame := self._connection.receive(None)) is not None:
                arrived = time.monotonic_ns()
                message = wire_message.decode(frame)
                if sent := wire_message.sent_at(frame):
                    self._hops.append((arrived - sent) / 1000)
                self._channel.put(message, wait=self._patient)
        except ChannelClosed as closed:
            reason = closed.reason or reason
        except MlxcelError as error:
            reason = str(error)
        except Exception as error:  # such as no memory for a large frame
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
        finally:
            self.close(reason)
