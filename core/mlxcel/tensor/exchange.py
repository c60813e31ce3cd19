"""The frames of one collective operation between a rank and its two neighbours in the ring.

Each frame says which operation it belongs to, how many there were before, the type of the
elements, and which piece of its stream it is; all numbers are little-endian::

    u8   operation    see OPERATIONS
    u8   dtype        see mlxcel.wire.tensor
    u8   0
    u32  piece
    u64  count
    ...  the piece

A rank sends before it receives, and all ranks may be doing so. So a piece is never larger than
what a connection takes while nobody reads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

from mlxcel.errors import WireError
from mlxcel.pipeline.group import RankGroup
from mlxcel.tensor.values import Values
from mlxcel.wire.tensor import DTYPES

Operation = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "broadcast", "barrier", "agreement"
]

OPERATIONS: tuple[Operation, ...] = get_args(Operation)

HEADER = struct.Struct("<BBxIQ")

AHEAD = 2
"""Pieces that a rank may send before it receives the one that belongs to the first of them."""


Take = Callable[[slice, Values], None]
"""Called with each piece that has come, and its place in the stream, in elements."""


class Exchange:
    """One operation.

    Args:
        group: Whom with.
        operation, count: Which one, and how many there were before.
        dtype: The name of the elements' type.
        piece: Bytes of every piece but the last one.
    """

    def __init__(
        self, group: RankGroup, operation: Operation, count: int, dtype: str, piece: int
    ) -> None:
        self.title = f"{operation} {count}"
        self._group = group
        self._next = (group.rank + 1) % group.size
        self._previous = (group.rank - 1) % group.size
        self._what = (OPERATIONS.index(operation), DTYPES[dtype].code)
        self._count = count
        self._piece = piece
        self._sent = self._received = 0

    def both(self, outgoing: Values, incoming: Values, take: Take) -> None:
        """Send ``outgoing`` to the next rank while the previous one sends as much as ``incoming``.

        Args:
            incoming: Says how many elements of which type come; not written to.
            take: What to do with them.

        Raises:
            RankLost: One of the two is gone, or was too slow.
            WireError: Something else came; the group is closed.
        """
        to_send, to_receive = self.pieces(outgoing), self.pieces(incoming)
        sent = 0
        for received in range(max(to_send, to_receive)):
            while sent < min(to_send, received + AHEAD):
                self.send(outgoing, sent)
                sent += 1
            if received < to_receive:
                self.receive(incoming, received, take)

    def pieces(self, values: Values) -> int:
        """How many pieces a stream of ``values`` has; an empty one has one."""
        return max(1, -(-values.nbytes // self._piece))

    def send(self, outgoing: Values, index: int) -> None:
        """Send piece ``index`` of ``outgoing`` to the next rank.

        Raises:
            RankLost: It is gone, or took nothing in time.
        """
        header = HEADER.pack(*self._what, self._sent, self._count)
        part = outgoing[self._place(outgoing, index)].view(np.uint8)
        self._group.send(self._next, (header, part.data), self.title)
        self._sent += 1

    def receive(self, incoming: Values, index: int, take: Take) -> None:
        """Take piece ``index`` of as much as ``incoming`` from the previous rank.

        Raises:
            RankLost: It is gone, or sent nothing in time.
            WireError: It is something else; the group is closed.
        """
        frame = self._group.receive(self._previous, self.title)
        place = self._place(incoming, index)
        due = incoming[place].nbytes
        expected = HEADER.pack(*self._what, self._received, self._count)
        if len(frame) != HEADER.size + due or frame[: HEADER.size] != expected:
            self._group.close()
            raise WireError(
                f"rank {self._previous} sent {_described(frame)} where piece {self._received} of "
                f"{self.title}, {due} bytes, was due"
            )
        self._received += 1
        take(place, np.frombuffer(frame[HEADER.size :], incoming.dtype))

    def _place(self, values: Values, index: int) -> slice:
        step = self._piece // values.itemsize
        return slice(index * step, (index + 1) * step)


def _described(frame: memoryview) -> str:
    if len(frame) < HEADER.size:
        return f"a frame of {len(frame)} bytes"
    operation, dtype, piece, count = HEADER.unpack(frame[: HEADER.size])
    if operation >= len(OPERATIONS):
        return f"a frame of the unknown operation {operation}"
    name = next((name for name, known in DTYPES.items() if known.code == dtype), "an unknown type")
    return (
        f"piece {piece} of {OPERATIONS[operation]} {count}, {len(frame) - HEADER.size} bytes "
        f"of {name},"
    )
