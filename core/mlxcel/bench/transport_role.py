"""What one process of ``mlxcel bench transport`` is told to be."""

from __future__ import annotations

import attrs


@attrs.frozen
class Role:
    """One of two ends.

    ``kind`` is the name of a transport, ``raw sockets`` or ``ring``; ``keys`` are the hex keys
    for sending and receiving, or None for frames in the clear; ``descriptor`` is the connected
    socket's; ``spin`` the seconds that a receiver polls.
    """

    kind: str
    drives: bool
    descriptor: int = -1
    keys: tuple[str, str] | None = None
    spin: float = 0.0
