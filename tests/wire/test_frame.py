"""Frames on a socket: whole, bounded, and honest about a stream that ends."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from mlxcel.errors import WireError
from mlxcel.wire.frame import receive_frame, send_frame

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair()
    with a, b:
        a.settimeout(10)
        b.settimeout(10)
        yield a, b


def test_pieces_arrive_as_one_frame(pair: Pair) -> None:
    """What was sent in pieces is received in one piece, small frames one after the other."""
    send_frame(pair[0], [b"ab", b"", memoryview(b"cd")])
    send_frame(pair[0], [])
    assert receive_frame(pair[1]) == b"abcd"
    assert receive_frame(pair[1]) == b""


def test_large_frames_arrive_whole(pair: Pair) -> None:
    """A frame far larger than the socket's buffer arrives byte for byte."""
    data = bytes(range(256)) * 40_000
    sender = threading.Thread(target=send_frame, args=(pair[0], [b"head", memoryview(data)]))
    sender.start()
    assert receive_frame(pair[1]) == b"head" + data
    sender.join()


def test_end_between_frames_is_no_error(pair: Pair) -> None:
    """A peer that closes after a whole frame has simply ended the stream."""
    send_frame(pair[0], [b"last"])
    pair[0].close()
    assert receive_frame(pair[1]) == b"last"
    assert receive_frame(pair[1]) is None


@pytest.mark.parametrize("sent", [b"\x05\x00\x00", struct.pack("<Q", 5) + b"abc"])
def test_end_within_a_frame_is_an_error(pair: Pair, sent: bytes) -> None:
    """A stream that ends within a length or a frame is malformed."""
    pair[0].sendall(sent)
    pair[0].close()
    with pytest.raises(WireError, match="ends within a frame"):
        receive_frame(pair[1])


@pytest.mark.parametrize("length", [101, 1 << 40, (1 << 64) - 1])
def test_length_is_checked_before_anything_is_allocated(pair: Pair, length: int) -> None:
    """A length above the cap is refused by its number alone."""
    pair[0].sendall(struct.pack("<Q", length))
    with pytest.raises(WireError, match=f"a frame of {length} bytes; 100 are allowed"):
        receive_frame(pair[1], max_bytes=100)
