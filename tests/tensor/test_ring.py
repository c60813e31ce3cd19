"""One rank of our ring; the other one is frames made by hand."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from mlxcel.errors import RankLost, WireError
from mlxcel.pipeline.group import DATA, RankGroup
from mlxcel.tensor.exchange import HEADER, OPERATIONS
from mlxcel.tensor.ring import RingCollectives
from mlxcel.transport import PlainConnection
from mlxcel.wire.tensor import DTYPES

WAIT = 10.0
FLOAT = DTYPES["float32"].code


@pytest.fixture
def other() -> Iterator[tuple[RingCollectives, PlainConnection]]:
    """Rank 0 of two, and the connection of rank 1, which has sent how large its pieces may be."""
    a, b = socket.socketpair()
    connection = PlainConnection(b, "rank 0")
    ring = RingCollectives(RankGroup(0, 0, 2, {1: PlainConnection(a, "rank 1")}, WAIT))
    send(connection, "agreement", 0, (1 << 16).to_bytes(8, "little"), DTYPES["int64"].code)
    yield ring, connection
    ring.close()
    connection.close()


def send(
    to: PlainConnection,
    operation: str,
    count: int,
    content: bytes,
    dtype: int = FLOAT,
    piece: int = 0,
) -> None:
    code = [*OPERATIONS, "unknown"].index(operation)
    to.send([DATA, HEADER.pack(code, dtype, piece, count), content], WAIT)


def test_what_belongs_to_the_operation_is_added(
    other: tuple[RingCollectives, PlainConnection],
) -> None:
    """The frame that is due, and nothing is answered but the own numbers."""
    ring, there = other
    send(there, "all-reduce", 1, np.float32([1, 2]).tobytes())
    assert ring.all_sum(mx.array([10.0, 20.0])).tolist() == [11, 22]
    there.receive(WAIT)  # the agreement
    frame = there.receive(WAIT)
    assert frame is not None
    assert np.frombuffer(frame[-8:], np.float32).tolist() == [10, 20]


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (("all-gather", 1, bytes(8)), "piece 0 of all-gather 1, 8 bytes of float32, where piece 0"),
        (("all-reduce", 2, bytes(8)), "of all-reduce 2"),
        (("all-reduce", 1, bytes(12)), "12 bytes of float32, where piece 0 of all-reduce 1, 8"),
        (("all-reduce", 1, bytes(8), DTYPES["int32"].code), "8 bytes of int32"),
        (("all-reduce", 1, bytes(8), 99), "8 bytes of an unknown type"),
        (("all-reduce", 1, bytes(8), FLOAT, 1), "piece 1 of all-reduce 1"),
        (("unknown", 1, bytes(8)), "a frame of the unknown operation 6"),
    ],
)
def test_anything_else_is_never_misread(
    other: tuple[RingCollectives, PlainConnection], frame: tuple[object, ...], words: str
) -> None:
    """Another operation, count, length, type or piece is refused, and the group is closed."""
    ring, there = other
    send(there, *frame)  # type: ignore[arg-type]
    with pytest.raises(WireError, match=words):
        ring.all_sum(mx.array([1.0, 2.0]))
    with pytest.raises(RankLost):
        ring.barrier()


def test_a_frame_that_is_cut_short(other: tuple[RingCollectives, PlainConnection]) -> None:
    """Less than a header is refused as such."""
    ring, there = other
    there.send([DATA, b"abc"], WAIT)
    with pytest.raises(WireError, match="a frame of 3 bytes where"):
        ring.barrier()


def test_an_agreement_on_nothing(other: tuple[RingCollectives, PlainConnection]) -> None:
    """Pieces of a size that no rank can ask for are refused."""
    a, b = socket.socketpair()
    there = PlainConnection(b, "rank 0")
    ring = RingCollectives(RankGroup(0, 0, 2, {1: PlainConnection(a, "rank 1")}, WAIT))
    send(there, "agreement", 0, bytes(8), DTYPES["int64"].code)
    with pytest.raises(WireError, match="pieces of 0 bytes"):
        ring.barrier()
    there.close()


def test_rows_that_cannot_be_shared() -> None:
    """A programming error, said before anything is sent."""
    ring = RingCollectives(RankGroup(0, 0, 2, {}, WAIT))
    for x in (mx.array(1.0), mx.zeros((3, 2))):
        with pytest.raises(ValueError, match="2 ranks cannot share"):
            ring.reduce_scatter(x)


def test_one_rank_is_a_group_too() -> None:
    """Nothing is sent, and everything is as it was."""
    ring = RingCollectives(RankGroup(0, 0, 1, {}, WAIT))
    x = mx.array([1.0, 2.0])
    ring.barrier()
    assert ring.all_sum(x).tolist() == ring.reduce_scatter(x).tolist() == [1, 2]
    assert ring.broadcast(x, 0).tolist() == [1, 2]
    assert ring.all_gather(x).tolist() == [[1, 2]]
