"""What all framed connections do: a frame that is not whole is the last one."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import pytest

from mlxcel.errors import ChannelClosed
from mlxcel.transport import Buffer, FramedConnection, TransportOptions

WAIT = 10.0


class Letters(FramedConnection):
    """A frame is one byte, its length, and then that many, of which ``!`` cannot be a part."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        super().__init__(sock, peer, TransportOptions(), 1, 256)

    def _make(self, pieces: Sequence[Buffer]) -> Iterator[Buffer]:
        yield bytes([sum(map(len, pieces))])
        for piece in pieces:
            if piece == b"!":
                raise ValueError("no such letter")
            yield piece

    def _read(self, header: bytes) -> memoryview:
        frame = memoryview(bytearray(header[0]))
        self._stream.skip(1)
        self._stream.read_into(frame)
        if b"?" in bytes(frame):
            raise ValueError("no such letter")
        return frame


@pytest.fixture
def ends() -> Iterator[tuple[Letters, Letters]]:
    a, b = (Letters(sock, name) for sock, name in zip(socket.socketpair(), "ba", strict=True))
    yield a, b
    a.close()
    b.close()


def test_frames_pass_and_are_counted(ends: tuple[Letters, Letters]) -> None:
    """Both ways, headers included, until the peer closes between two frames."""
    a, b = ends
    a.send([b"one", b"two"], WAIT)
    assert b.receive(WAIT) == b"onetwo"
    assert a.sent == b.received == 7
    b.send([], WAIT)
    assert a.receive(WAIT) == b""
    a.close()
    assert b.receive(WAIT) is None


def test_a_frame_that_cannot_be_made_whole_is_the_last(ends: tuple[Letters, Letters]) -> None:
    """A part of it is on its way: whatever went wrong, the peer would misread what follows."""
    a, b = ends
    with pytest.raises(ValueError, match="no such letter"):
        a.send([b"one", b"!"], WAIT)
    with pytest.raises(ChannelClosed):
        a.send([b"two"], WAIT)
    with pytest.raises(ChannelClosed, match="ended within a message"):
        b.receive(WAIT)


def test_a_frame_that_cannot_be_read_is_the_last(ends: tuple[Letters, Letters]) -> None:
    """Whoever sends such frames is not heard further."""
    a, b = ends
    a.send([b"what?"], WAIT)
    a.send([b"more"], WAIT)
    with pytest.raises(ValueError, match="no such letter"):
        b.receive(WAIT)
    with pytest.raises(ChannelClosed):
        b.receive(WAIT)
