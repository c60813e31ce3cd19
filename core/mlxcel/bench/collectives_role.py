"""What one process of ``mlxcel bench collectives`` is told to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs


@attrs.frozen
class Role:
    """One rank.

    ``transport`` carries the ``connections``: by rank the socket's descriptor and the hex keys
    for sending and receiving, or none for frames in the clear. Without a transport it is the
    ring of MLX that connects the ``hosts``. ``spin`` are the seconds that a receiver polls.
    """

    rank: int
    size: int
    transport: str = ""
    connections: Mapping[str, tuple[int, Sequence[str]]] = attrs.field(factory=dict)
    hosts: Sequence[str] = ()
    spin: float = 0.0
