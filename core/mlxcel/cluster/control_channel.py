"""Messages over an authenticated connection, for the event loop."""

from __future__ import annotations

from mlxcel.cluster.messages import ToCoordinator, ToPeer
from mlxcel.cluster.session import Session

ControlMessage = ToPeer | ToCoordinator


class ControlChannel:
    """Sealed JSON messages both ways, over a session whose socket it owns from now on.

    Messages of the kind that the other end's role sends are accepted: a coordinator sends
    :data:`ToPeer`, a peer :data:`ToCoordinator`.

    Attributes:
        session: The session, for the peer's introduction and address.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    async def send(self, message: ControlMessage, timeout: float) -> None:
        """Send ``message`` within ``timeout`` seconds; any number of tasks may send.

        Raises:
            DeadlineError: The other node took nothing in time; the channel is closed.
            ChannelClosed: The connection is gone.
        """

    async def receive(self, timeout: float | None) -> ControlMessage | None:
        """The next message, or None when the other node has closed between two messages.

        After a time-out, or when the call is cancelled, the channel can still be used. One
        task may receive at a time.

        Raises:
            DeadlineError: Nothing came in time.
            WireError: The message is forged, malformed or not one that this node understands;
                the channel is closed.
            ChannelClosed: The connection broke.
        """
        ...

    def close(self) -> None:
        """End the connection and wake whoever waits in it; harmless when repeated."""
