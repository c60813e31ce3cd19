"""What a transport is: it turns authenticated sockets into connections that carry frames.

Listening, dialling and the handshake are core's, the same for every transport, so that no
transport can forget them. A transport gets the socket and the keys when both ends know each
other, and moves bytes. Connections are used by threads that touch bytes only, never MLX.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Literal, Protocol

import attrs

from mlxcel.wire.tensor import Buffer

TrafficClass = Literal["pp_activation", "tp_collective"]
"""What a connection is for: hidden states between stages, or sums within a stage."""


@attrs.frozen
class Keys:
    """The AES-256 keys of one connection, 32 bytes for each direction, as seen from this end."""

    send: bytes = attrs.field(repr=False)
    receive: bytes = attrs.field(repr=False)


@attrs.frozen
class TransportOptions:
    """How connections behave.

    ``spin`` are the seconds that a receiver polls before it sleeps (0 never polls): a wake-up
    costs about 50 microseconds, spinning costs a core. ``stall`` are the seconds that a peer
    may stand still within a frame. ``max_frame`` is the largest frame that is accepted, in
    bytes.
    """

    spin: float = 0.0
    stall: float = 30.0
    max_frame: int = (1 << 30) + (64 << 20)


class Connection(Protocol):
    """Carries whole frames both ways, in order; one thread may send while one receives."""

    @property
    def peer(self) -> str:
        """Who is at the other end, for errors."""
        ...

    @property
    def sent(self) -> int:
        """Bytes sent so far, headers and tags included."""
        ...

    @property
    def received(self) -> int:
        """Bytes received so far, headers and tags included."""
        ...

    @property
    def room(self) -> int:
        """Bytes that it takes while the peer takes none, so that a send of them does not wait."""
        ...

    def send(self, pieces: Sequence[Buffer], timeout: float) -> None:
        """Send ``pieces`` as one frame within ``timeout`` seconds.

        Raises:
            DeadlineError: The peer took nothing in time.
            ChannelClosed: The connection is gone.
        """

    def receive(self, timeout: float | None) -> memoryview | None:
        """The next frame, or None when the peer has closed between two frames.

        Args:
            timeout: Seconds to wait for it to begin; None waits as long as the peer lives.

        Raises:
            DeadlineError: Nothing came in time.
            WireError: The frame is forged, damaged, out of order, or too large; the
                connection is closed.
            ChannelClosed: The connection broke.
        """
        ...

    def close(self) -> None:
        """End the connection and wake whoever waits in it; harmless when repeated."""


class Transport(Protocol):
    """Makes connections. A plugin provides one through the hook ``mlxcel_make_transport``."""

    @property
    def name(self) -> str:
        """What ``--transport-backend`` calls it."""
        ...

    def connection(
        self, sock: socket.socket, keys: Keys | None, peer: str, traffic: TrafficClass
    ) -> Connection:
        """The connection on ``sock``, whose handshake is over; it owns the socket from now on.

        Args:
            keys: What protects the frames; None sends them in the clear, for benches only.
        """
        ...
