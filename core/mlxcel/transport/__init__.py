"""How frames get from one machine to another; transports are plugins."""

from mlxcel.transport.buffers import widen
from mlxcel.transport.contract import (
    Connection,
    Keys,
    TrafficClass,
    Transport,
    TransportOptions,
)
from mlxcel.transport.framed import FramedConnection
from mlxcel.transport.memory import allocate
from mlxcel.transport.plain import PlainConnection
from mlxcel.transport.stream import ByteStream
from mlxcel.transport.tcp_options import set_tcp_options
from mlxcel.wire.tensor import Buffer

__all__ = [
    "Buffer",
    "ByteStream",
    "Connection",
    "FramedConnection",
    "Keys",
    "PlainConnection",
    "TrafficClass",
    "Transport",
    "TransportOptions",
    "allocate",
    "set_tcp_options",
    "widen",
]
