"""How frames get from one machine to another; transports are plugins."""

from mlxcel.transport.contract import (
    Connection,
    Keys,
    TrafficClass,
    Transport,
    TransportOptions,
)
from mlxcel.transport.plain import PlainConnection
from mlxcel.transport.stream import ByteStream
from mlxcel.transport.tune import tune

__all__ = [
    "ByteStream",
    "Connection",
    "Keys",
    "PlainConnection",
    "TrafficClass",
    "Transport",
    "TransportOptions",
    "tune",
]
