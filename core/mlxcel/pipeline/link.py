"""One direction of a connection between two neighbours of a pipeline.

The stage's loop knows only :class:`Link`; whether threads, processes or hosts stand at its
ends is a matter of which link it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import attrs

from mlxcel.pipeline.channel import Channel
from mlxcel.pipeline.step import Message, Step
from mlxcel.wire import message as wire_message
from mlxcel.wire.tensor import WireTensor


class Outbox(Protocol):
    """The sending end of a stream of messages."""

    def send(self, message: Message) -> None:
        """Hand ``message`` over; never waits for the receiver.

        Raises:
            ChannelClosed: The link is closed.
            ChannelFull: More messages are in flight than there are credits.
        """

    def close(self, reason: str | None = None) -> None:
        """End the stream for both ends; harmless when repeated."""


class Inbox(Protocol):
    """The receiving end of a stream of messages."""

    def receive(self, timeout: float) -> Message:
        """The next message, waiting up to ``timeout`` seconds.

        Raises:
            ChannelClosed: The link is closed, and all that was sent has been received.
            DeadlineError: Nothing came in time.
        """
        ...

    def poll(self) -> Message | None:
        """The next message if it is there already, else None.

        Raises:
            ChannelClosed: The link is closed, and all that was sent has been received.
        """
        ...

    def listen(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called, in whichever thread, when there may be something to poll."""

    def take_hops(self) -> tuple[float, ...]:
        """Microseconds that recent messages took from the sender to here; forgets them.

        A sample of at most 64; empty where nothing travels (threads of one process). Any thread
        may ask.
        """
        ...

    @property
    def received(self) -> int:
        """Bytes that came over a wire so far; none between threads."""
        ...

    def close(self, reason: str | None = None) -> None:
        """End the stream for both ends; harmless when repeated."""


class Link(Outbox, Inbox, Protocol):
    """Both ends in one object, for threads of one process."""


@attrs.frozen
class MemoryLink:
    """A link between two threads: messages pass as they are, arrays and all."""

    channel: Channel[Message]

    def send(self, message: Message) -> None:
        self.channel.put(message)

    def receive(self, timeout: float) -> Message:
        return self.channel.get(timeout)

    def poll(self) -> Message | None:
        return self.channel.poll()

    def listen(self, listener: Callable[[], None]) -> None:
        self.channel.listen(listener)

    def take_hops(self) -> tuple[float, ...]:
        return ()

    @property
    def received(self) -> int:
        return 0

    def close(self, reason: str | None = None) -> None:
        self.channel.close(reason)


def memory_link(capacity: int, name: str) -> Link:
    """A link between two threads that holds ``capacity`` messages; ``name`` is for errors."""
    return MemoryLink(Channel(capacity, name))


@attrs.frozen
class WireLink:
    """A link whose every message takes the way of the wire: arrays to bytes and back.

    With it, one process proves the wire format (``--pp-wire``). ``to_wire`` turns an array
    of the sending stage into a :class:`WireTensor` and runs in the sender's thread,
    ``from_wire`` turns that into an array of the receiving stage in the receiver's.
    """

    inner: Link
    to_wire: Callable[[Any], WireTensor]
    from_wire: Callable[[WireTensor], Any]

    def send(self, message: Message) -> None:
        buffer = wire_message.encode(_convert(message, self.to_wire))
        self.inner.send(wire_message.decode(buffer))

    def receive(self, timeout: float) -> Message:
        return _convert(self.inner.receive(timeout), self.from_wire)

    def poll(self) -> Message | None:
        message = self.inner.poll()
        return None if message is None else _convert(message, self.from_wire)

    def listen(self, listener: Callable[[], None]) -> None:
        self.inner.listen(listener)

    def take_hops(self) -> tuple[float, ...]:
        return self.inner.take_hops()

    @property
    def received(self) -> int:
        return self.inner.received

    def close(self, reason: str | None = None) -> None:
        self.inner.close(reason)


def _convert(message: Message, convert: Callable[[Any], Any]) -> Message:
    if not isinstance(message, Step):
        return message
    return attrs.evolve(message, tensors={n: convert(t) for n, t in message.tensors.items()})
