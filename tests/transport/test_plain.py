"""Frames in the clear: whole, in order, within their deadlines, and never larger than allowed."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from mlxcel.errors import ChannelClosed, DeadlineError, WireError
from mlxcel.transport.contract import TransportOptions
from mlxcel.transport.plain import PlainConnection

Pair = tuple[PlainConnection, PlainConnection]
WAIT = 10.0


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


@pytest.fixture(params=[0.0, 1e-3], ids=["sleeping", "spinning"])
def pair(
    request: pytest.FixtureRequest, sockets: tuple[socket.socket, socket.socket]
) -> Iterator[Pair]:
    options = TransportOptions(spin=request.param, max_frame=64 << 20)
    a, b = (PlainConnection(sock, name, options) for sock, name in zip(sockets, "ba", strict=True))
    yield a, b
    a.close()
    b.close()


def test_frames_pass_whole_and_in_order(pair: Pair) -> None:
    """Pieces of any kind arrive as one frame, an empty one too."""
    pair[0].send([b"ab", b"", memoryview(b"cd")], WAIT)
    pair[0].send([], WAIT)
    assert pair[1].receive(WAIT) == b"abcd"
    assert pair[1].receive(WAIT) == b""
    assert pair[0].sent == pair[1].received == 20


def test_a_frame_larger_than_all_buffers_arrives(pair: Pair) -> None:
    """Many pieces, one of them much larger than what a socket holds at once."""
    pieces = [bytes([n]) * 1000 for n in range(200)] + [bytes(range(256)) * (16 << 12)]
    sender = threading.Thread(target=pair[0].send, args=(pieces, WAIT))
    sender.start()
    assert pair[1].receive(WAIT) == b"".join(pieces)
    sender.join()


def test_one_thread_sends_while_one_receives(pair: Pair) -> None:
    """The directions do not share a deadline: a short one here does not end a long one there."""
    received: list[memoryview | None] = []
    receiver = threading.Thread(target=lambda: received.append(pair[0].receive(WAIT)))
    receiver.start()
    pair[0].send([b"there"], 0.01)
    assert pair[1].receive(WAIT) == b"there"
    pair[1].send([b"back"], WAIT)
    receiver.join()
    assert received == [b"back"]


def test_nothing_in_time_is_a_deadline(pair: Pair) -> None:
    """The error names the peer, and the connection stays usable."""
    with pytest.raises(DeadlineError, match=r"^a did not answer within 0\.01 s"):
        pair[1].receive(0.01)
    pair[0].send([b"late"], WAIT)
    assert pair[1].receive(WAIT) == b"late"


def test_a_peer_that_takes_nothing_is_a_deadline(pair: Pair) -> None:
    """A frame that cannot be finished ends the connection: half of it is on its way."""
    with pytest.raises(DeadlineError, match=r"^b did not answer within"):
        pair[0].send([bytes(32 << 20)], 0.01)
    with pytest.raises(ChannelClosed, match="closed here"):
        pair[0].send([b"more"], WAIT)


def test_the_end_between_two_frames_is_none(pair: Pair) -> None:
    """A peer that closes in order leaves what it sent, and then the end."""
    pair[0].send([b"last"], WAIT)
    pair[0].close()
    assert pair[1].receive(WAIT) == b"last"
    assert pair[1].receive(WAIT) is None


@pytest.mark.parametrize("junk", [b"\1", struct.pack("<Q", 4) + b"abc"])
def test_the_end_within_a_frame_is_a_broken_connection(
    sockets: tuple[socket.socket, socket.socket], junk: bytes
) -> None:
    """Neither half a length nor half a frame is taken for anything."""
    connection = PlainConnection(sockets[1], "a")
    sockets[0].sendall(junk)
    sockets[0].close()
    with pytest.raises(ChannelClosed, match="it ended within a message"):
        connection.receive(WAIT)


def test_oversized_frames_are_refused_before_they_come(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    """The length alone is enough to close the connection."""
    connection = PlainConnection(sockets[1], "a", TransportOptions(max_frame=100))
    sockets[0].sendall(struct.pack("<Q", 101))
    with pytest.raises(WireError, match="a frame of 101 bytes; 100 are allowed"):
        connection.receive(WAIT)
    sockets[0].settimeout(WAIT)
    assert sockets[0].recv(1) == b""  # it has hung up


def test_sending_to_nobody_is_a_closed_channel(pair: Pair) -> None:
    """The error names the peer."""
    pair[1].close()
    with pytest.raises(ChannelClosed, match=r"^b is closed"):
        pair[0].send([b"x"], WAIT)


def test_closing_wakes_who_waits(pair: Pair) -> None:
    """A thread that waits without a deadline ends with its connection."""
    ended: list[object] = []

    def wait() -> None:
        try:
            ended.append(pair[1].receive(None))
        except ChannelClosed as closed:
            ended.append(closed)

    waiting = threading.Thread(target=wait)
    waiting.start()
    pair[1].close()
    waiting.join(WAIT)
    assert len(ended) == 1
