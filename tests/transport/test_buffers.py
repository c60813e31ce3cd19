"""Room in sockets."""

from __future__ import annotations

import socket

import pytest

from mlxcel.transport.buffers import LEAST, room, widen


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_the_room_is_really_there(kind: str) -> None:
    """So many bytes are taken at once while nobody reads, in both directions."""
    if kind == "unix":
        a, b = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            a = socket.create_connection(listener.getsockname())
            b = listener.accept()[0]
    with a, b:
        for sock in (a, b):
            widen(sock)
            sock.setblocking(False)
        for sock in (a, b):
            assert room(sock) >= LEAST // 2
            left = room(sock)
            while left:  # raises BlockingIOError when there is no room
                left -= sock.send(bytes(left))


def test_what_is_wide_is_left_alone() -> None:
    """A socket that somebody has given more keeps it."""
    a, b = socket.socketpair()
    with a, b:
        widen(a)
        before = room(a)
        widen(a)
        assert room(a) == before
