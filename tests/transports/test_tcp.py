"""The transport ``tcp``: sealed frames over real sockets."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from mlxcel.errors import ChannelClosed, DeadlineError, WireError
from mlxcel.plugins import Plugins
from mlxcel.transport import Connection, Keys, TransportOptions
from mlxcel.transport.make import make_transport
from mlxcel.wire.sealed import CHUNK, HEADER, TAG, Sealer, chunk_sizes

WAIT = 10.0
HERE, THERE = b"h" * 32, b"t" * 32
OPTIONS = TransportOptions(max_frame=64 << 20, stall=WAIT)

Sockets = tuple[socket.socket, socket.socket]
Pair = tuple[Connection, Connection]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as a,
        listener.accept()[0] as b,
    ):
        yield a, b


def connect(sock: socket.socket, keys: Keys | None, options: TransportOptions) -> Connection:
    transport = make_transport(Plugins.discover(environ={}), "tcp", options)
    return transport.connection(sock, keys, "the peer", "pp_activation")


@pytest.fixture(params=[0.0, 1e-3], ids=["sleeping", "spinning"])
def pair(request: pytest.FixtureRequest, sockets: Sockets) -> Iterator[Pair]:
    options = TransportOptions(spin=request.param, max_frame=64 << 20)
    a = connect(sockets[0], Keys(HERE, THERE), options)
    b = connect(sockets[1], Keys(THERE, HERE), options)
    yield a, b
    a.close()
    b.close()


@pytest.fixture
def victim(sockets: Sockets) -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and the socket at its other end."""
    connection = connect(sockets[1], Keys(THERE, HERE), OPTIONS)
    yield connection, sockets[0]
    connection.close()


def test_frames_pass_both_ways(pair: Pair) -> None:
    """Small, empty and pipelined frames arrive whole and in order; all bytes are counted."""
    a, b = pair
    for n in range(200):
        a.send([b"head", bytes(n)], WAIT)
    for n in range(200):
        assert b.receive(WAIT) == b"head" + bytes(n)
    b.send([], WAIT)
    assert a.receive(WAIT) == b""
    assert a.sent == b.received == sum(HEADER + 4 + n + TAG for n in range(200))
    assert b.sent == a.received == HEADER + TAG


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 20 * CHUNK + 5])
def test_large_frames_pass(pair: Pair, size: int) -> None:
    """Frames of many chunks arrive while they are still being sent, with one behind them."""
    a, b = pair
    plain = (bytes(range(256)) * (size // 256 + 1))[:size]

    def send() -> None:
        a.send([plain[:100], memoryview(plain)[100:]], WAIT)
        a.send([b"behind"], WAIT)

    sender = threading.Thread(target=send)
    sender.start()
    assert b.receive(WAIT) == plain
    assert b.receive(WAIT) == b"behind"
    sender.join()


def test_two_senders_do_not_harm_each_other(pair: Pair) -> None:
    """The contract allows one; two must not make two frames with one nonce."""
    a, b = pair
    frames = [bytes([n]) * 9000 for n in range(2)]

    def send(frame: bytes) -> None:
        for _ in range(300):
            a.send([frame], WAIT)

    senders = [threading.Thread(target=send, args=(frame,)) for frame in frames]
    for sender in senders:
        sender.start()
    received = [b.receive(WAIT) for _ in range(600)]
    assert all(received.count(frame) == 300 for frame in frames)  # type: ignore[arg-type]
    for sender in senders:
        sender.join()


def test_a_received_frame_stays_as_it_is(pair: Pair) -> None:
    """The next frame does not overwrite the one before."""
    pair[0].send([b"first"], WAIT)
    pair[0].send([b"other"], WAIT)
    first = pair[1].receive(WAIT)
    assert pair[1].receive(WAIT) == b"other"
    assert first == b"first"


def test_nothing_on_the_wire_is_readable(victim: tuple[Connection, socket.socket]) -> None:
    """Only the length travels in the clear."""
    connection, sock = victim
    connection.send([b"a secret text"], WAIT)
    assert sock.recv(100)[:HEADER] == (13).to_bytes(8, "little")
    connection.send([b"a secret text"], WAIT)
    assert b"secret" not in sock.recv(100)


def test_an_orderly_end_is_none(pair: Pair) -> None:
    """What was sent before the end can be received, then there is nothing more."""
    pair[0].send([b"last"], WAIT)
    pair[0].close()
    assert pair[1].receive(WAIT) == b"last"
    assert pair[1].receive(WAIT) is None


def test_silence_is_a_deadline_and_the_connection_lives(pair: Pair) -> None:
    """Who waited in vain may wait again."""
    with pytest.raises(DeadlineError, match=r"the peer did not answer within 0.01 s.*next message"):
        pair[1].receive(0.01)
    pair[0].send([b"late"], WAIT)
    assert pair[1].receive(WAIT) == b"late"


def test_a_peer_that_takes_nothing_is_a_deadline(pair: Pair) -> None:
    """Once the buffers of the system are full, send ends in time, and with it the connection."""
    with pytest.raises(DeadlineError, match=r"the peer.*to be taken"):
        pair[0].send([bytes(60 << 20)], 0.05)
    with pytest.raises(ChannelClosed):
        pair[0].send([b"more"], WAIT)


def test_a_peer_that_stands_still_within_a_frame_is_a_deadline(sockets: Sockets) -> None:
    """Also for whoever waits without a limit for a frame to begin."""
    options = TransportOptions(stall=0.01)
    connection = connect(sockets[1], Keys(THERE, HERE), options)
    sockets[0].sendall(Sealer(HERE).frame([b"half a frame"])[:-1])
    with pytest.raises(DeadlineError, match="the rest of a message"):
        connection.receive(None)
    with pytest.raises(ChannelClosed):
        connection.receive(None)


def test_closing_wakes_the_receiver(pair: Pair) -> None:
    """Whoever waits without a limit learns at once that there is nothing to wait for."""
    caught: list[BaseException] = []

    def receive() -> None:
        try:
            pair[0].receive(None)
        except ChannelClosed as error:
            caught.append(error)

    receiver = threading.Thread(target=receive)
    receiver.start()
    pair[0].close()
    receiver.join(WAIT)
    assert str(caught[0]) == "the peer is closed: it was closed here"
    pair[0].close()


def frames(*texts: bytes) -> list[bytes]:
    sealer = Sealer(HERE)
    return [sealer.frame([text]) for text in texts]


FORGERIES = {
    "dropped": lambda f: f[1],
    "repeated": lambda f: f[0] + f[0],
    "reordered": lambda f: f[1] + f[0],
    "injected": lambda f: Sealer(b"x" * 32).frame([b"evil"]) + f[0],
    "flipped": lambda f: f[0][:-1] + bytes([f[0][-1] ^ 1]),
    "too long": lambda f: b"\xff" * 8 + f[0],
    "longer than it is": lambda f: (6).to_bytes(8, "little") + f[0][8:] + f[1],
    "reflected": lambda f: Sealer(THERE).frame([b"mine"]),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forgeries_end_the_connection(
    forgery: str, victim: tuple[Connection, socket.socket]
) -> None:
    """Nothing forged is delivered, and nothing after it."""
    connection, sock = victim
    sock.sendall(FORGERIES[forgery](frames(b"one", b"two")) + frames(b"one")[0])
    first = FORGERIES[forgery](frames(b"one", b"two"))[: len(frames(b"one")[0])]
    if first == frames(b"one")[0]:
        assert connection.receive(WAIT) == b"one"
    with pytest.raises(WireError):
        connection.receive(WAIT)
    with pytest.raises(ChannelClosed):
        connection.receive(WAIT)


def chunks_of(frame: bytes, length: int) -> list[bytes]:
    """The header of a sealed frame, then its chunks with their tags."""
    cuts = [0, HEADER]
    for size in chunk_sizes(length):
        cuts.append(cuts[-1] + size + TAG)
    assert cuts[-1] == len(frame)
    return [frame[start:stop] for start, stop in pairwise(cuts)]


# What is done to the header and the chunks of one frame that has three or more.
TAMPERINGS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "second flipped": lambda c: [*c[:2], bytes([c[2][0] ^ 1]) + c[2][1:], *c[3:]],
    "second lost": lambda c: [*c[:2], *c[3:]],
    "second and third swapped": lambda c: [*c[:2], c[3], c[2], *c[4:]],
    "first twice": lambda c: [*c[:2], *c[1:]],
    "second twice": lambda c: [*c[:3], *c[2:]],
    "tail lost": lambda c: [*c[:-1], c[-1][:-1]],
    "last lost": lambda c: c[:-1],
    "length less": lambda c: [(int.from_bytes(c[0], "little") - 1).to_bytes(8, "little"), *c[1:]],
    "length more": lambda c: [(int.from_bytes(c[0], "little") + 1).to_bytes(8, "little"), *c[1:]],
}


@pytest.mark.parametrize("length", [2 * CHUNK + 1, 2 * CHUNK + 5, 3 * CHUNK])
@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_tampering_with_chunks_ends_the_connection(tampering: str, length: int) -> None:
    """A frame is delivered whole or not at all, and nothing after it; as it was, it is."""
    plain = (bytes(range(256)) * (length // 256 + 1))[:length]
    chunks = chunks_of(Sealer(HERE).frame([plain]), length)
    for tamper in (TAMPERINGS[tampering], None):
        mine, other = socket.socketpair()
        connection = connect(other, Keys(THERE, HERE), OPTIONS)
        sent = b"".join(tamper(chunks) if tamper else chunks)

        def send(sock: socket.socket = mine, sent: bytes = sent) -> None:
            with contextlib.suppress(OSError):
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        if tamper is None:
            assert connection.receive(WAIT) == plain
        else:
            with pytest.raises((WireError, ChannelClosed)):
                connection.receive(WAIT)
            with pytest.raises(ChannelClosed, match="it was closed here"):
                connection.receive(WAIT)
        connection.close()
        sender.join(WAIT)
        mine.close()


def test_a_truncated_frame_is_an_error_not_an_end(
    victim: tuple[Connection, socket.socket],
) -> None:
    """Only between two frames may a stream end."""
    connection, sock = victim
    sock.sendall(frames(b"cut")[0][:-3])
    sock.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelClosed, match="ended within a message"):
        connection.receive(WAIT)


def test_a_forged_length_within_the_cap_costs_nothing(
    victim: tuple[Connection, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for a large frame is taken only when its first chunk has proved the length."""
    import mlxcel_transport_tcp.connection as module

    allocated: list[int] = []
    monkeypatch.setattr(module, "allocate", allocated.append)
    connection, sock = victim
    sock.sendall((60 << 20).to_bytes(8, "little") + bytes(CHUNK + TAG))
    with pytest.raises(WireError):
        connection.receive(WAIT)
    assert allocated == []


def test_without_keys_frames_are_in_the_clear(sockets: Sockets) -> None:
    """For benches: the same transport without encryption."""
    a, b = (connect(sock, None, OPTIONS) for sock in sockets)
    a.send([b"plain"], WAIT)
    assert b.receive(WAIT) == b"plain"
    a.close()
    b.close()


def test_small_frames_are_not_held_back(sockets: Sockets) -> None:
    """The system sends at once and watches over idle connections."""
    connection = connect(sockets[0], Keys(HERE, THERE), OPTIONS)
    assert sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    connection.close()


def test_the_plugin_is_light() -> None:
    """Listing transports imports neither MLX nor what encrypts."""
    source = (
        "import sys, mlxcel_transport_tcp\n"
        "assert not {'mlx', 'mlx_lm', 'cryptography'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)
