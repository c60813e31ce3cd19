"""A connection between two nodes that have proved to each other that they know the secret."""

from __future__ import annotations

import socket
from collections.abc import Callable

import attrs

from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.sockets import hang_up
from mlxcel.transport.contract import Keys


def _nothing() -> None:
    pass


@attrs.define(eq=False)
class Session:
    """One authenticated connection. Whoever holds it closes it, or takes its socket away.

    Attributes:
        sock: Connected and non-blocking.
        keys: What seals the frames of this connection, as seen from this end.
        peer: Who the other node says it is.
        address: Where it is, such as ``10.0.0.2:19000``; of an accepted connection, where it
            came from.
    """

    sock: socket.socket
    keys: Keys
    peer: Introduction
    address: str
    _on_end: Callable[[], None] = attrs.field(default=_nothing, repr=False, alias="on_end")
    _on_forgery: Callable[[], None] = attrs.field(default=_nothing, repr=False, alias="on_forgery")

    def take_socket(self) -> socket.socket:
        """The socket, which the caller closes from now on; the session is over for its gate."""
        self._end()
        return self.sock

    def report_forgery(self) -> None:
        """Have its gate count that this connection brought what its peer cannot have sent."""
        self._on_forgery()

    def close(self) -> None:
        """End the connection; harmless when repeated."""
        hang_up(self.sock)
        self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, _nothing
        on_end()
