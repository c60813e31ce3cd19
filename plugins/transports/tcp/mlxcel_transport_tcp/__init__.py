"""The transport ``tcp``: sealed frames over the sockets that the cluster connects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxcel.hookspecs import hookimpl

if TYPE_CHECKING:
    from mlxcel.transport import Transport, TransportOptions

api_version = "1.0"


@hookimpl
def mlxcel_make_transport(name: str, options: TransportOptions) -> Transport | None:
    """Make the transport if it is this one that is asked for."""
    if name != "tcp":
        return None
    from mlxcel_transport_tcp.transport import TcpTransport

    return TcpTransport(options)
