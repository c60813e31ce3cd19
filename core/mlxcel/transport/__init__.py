"""How frames get from one machine to another; transports are plugins."""

from mlxcel.transport.contract import (
    Connection,
    Keys,
    TrafficClass,
    Transport,
    TransportOptions,
)

__all__ = ["Connection", "Keys", "TrafficClass", "Transport", "TransportOptions"]
