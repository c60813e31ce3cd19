"""Makes connections of sockets, and sets these up for small frames and dead peers."""

from __future__ import annotations

import socket

from mlxcel.transport import (
    Connection,
    Keys,
    PlainConnection,
    TrafficClass,
    TransportOptions,
    set_tcp_options,
    widen,
)
from mlxcel_transport_tcp.connection import SealedConnection


class TcpTransport:
    """See :class:`mlxcel.transport.Transport`."""

    name = "tcp"

    def __init__(self, options: TransportOptions) -> None:
        self._options = options

    def connection(
        self, sock: socket.socket, keys: Keys | None, peer: str, traffic: TrafficClass
    ) -> Connection:
        """The connection on ``sock``; where all ranks send at once, it has much room."""
        set_tcp_options(sock)
        if traffic == "tp_collective":
            widen(sock)
        if keys is None:
            return PlainConnection(sock, peer, self._options)
        return SealedConnection(sock, keys, peer, self._options)
