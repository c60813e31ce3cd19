"""Somebody on the network without the secret, against a node that is at work.

Every attack runs beside a stream of control messages and data frames, which must not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import selectors
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from aiohttp import web

from mlxcel.cli.peer import MOST_CONNECTIONS
from mlxcel.cluster.addresses import Address
from mlxcel.cluster.control_channel import ControlChannel, decode_message, encode_message
from mlxcel.cluster.dial import dial
from mlxcel.cluster.gate import Gate, GateLimits
from mlxcel.cluster.handshake import Accept, Dialer, Refuse, Verdict
from mlxcel.cluster.introduction import Introduction, Purpose
from mlxcel.cluster.messages import Ping, Pong
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.session import Session
from mlxcel.errors import MlxcelError, SecretMismatch, WireError
from mlxcel.plugins import Plugins
from mlxcel.server.run import bind, make_runner
from mlxcel.server.site import Site
from mlxcel.transport import Connection, TransportOptions
from mlxcel.transport.make import make_transport
from mlxcel.wire.sealed import CHUNK, HEADER, TAG, sealed_size

SECRET = ClusterSecret(b"the secret of this test")
PEER = Introduction("peer", "peer", "c", {}, {}, ("llama",))
COORDINATOR = attrs.evolve(PEER, node="coordinator", role="coordinator")
DATA = Purpose("data", "s", "0-1", "pp_activation")
WAIT = 20.0
SECONDS = 0.5
"""Of a handshake at most."""


def connection(session: Session) -> Connection:
    options = TransportOptions(max_frame=8 << 20, stall=WAIT)
    transport = make_transport(Plugins.discover(environ={}), "tcp", options)
    return transport.connection(
        session.take_socket(), session.keys, session.address, "pp_activation"
    )


class Node:
    """A gate in an event loop of its own; it answers pings and returns the frames of data links.

    Attributes:
        delivered: What connections have brought, by the cluster's name in their introduction.
        ended: How they ended: None in order, else the error.
    """

    def __init__(self) -> None:
        self.delivered: dict[str, list[bytes]] = {}
        self.ended: dict[str, BaseException | None] = {}
        self.changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        limits = GateLimits(seconds=SECONDS)
        self.gate = Gate(SECRET, lambda: PEER, self._judge, self._on_session, limits)
        self.address = self.call(self.gate.listen(Address("127.0.0.1", 0)))

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT)

    def close(self) -> None:
        self.call(self.gate.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT)
        self._loop.close()

    def wait_for(self, wanted: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(wanted, WAIT), (self.gate.counts, self.ended)

    def counted(self, reason: str, times: int = 1) -> None:
        """Wait until this many connections have ended for this reason."""
        pause = threading.Event()
        for _ in range(int(WAIT / 0.01)):
            if getattr(self.gate.counts, reason) >= times:
                assert getattr(self.gate.counts, reason) == times
                return
            pause.wait(0.01)
        raise AssertionError(self.gate.counts)

    def connect(self, name: str, purpose: Purpose, port: int | None = None) -> Session:
        """Dial the node as one who knows the secret."""
        address = attrs.evolve(self.address, port=port or self.address.port)
        introduction = attrs.evolve(COORDINATOR, cluster=name, purpose=purpose)
        return asyncio.run(dial(address, SECRET, introduction, WAIT))

    def _judge(self, dialer: Introduction) -> Verdict:
        return Refuse("unwanted") if dialer.cluster == "unwanted" else Accept()

    async def _on_session(self, session: Session) -> None:
        name = session.peer.cluster
        self.delivered[name] = []
        if session.peer.purpose.kind == "control":
            await self._control(name, session)
        else:
            link = connection(session)
            threading.Thread(target=self._data, args=(name, link), daemon=True).start()

    async def _control(self, name: str, session: Session) -> None:
        channel = ControlChannel(session)
        ended: BaseException | None = None
        try:
            while (message := await channel.receive(None)) is not None:
                self._deliver(name, encode_message(message))
                assert isinstance(message, Ping)
                await channel.send(Pong(message.number, 0.5), WAIT)
        except MlxcelError as error:
            ended = error
        finally:
            channel.close()
        self._end(name, ended)

    def _data(self, name: str, link: Connection) -> None:
        ended: BaseException | None = None
        try:
            while (frame := link.receive(None)) is not None:
                self._deliver(name, bytes(frame))
                link.send([frame], WAIT)
        except MlxcelError as error:
            ended = error
        link.close()
        self._end(name, ended)

    def _deliver(self, name: str, what: bytes) -> None:
        if name != "stream":
            self.delivered[name].append(what)

    def _end(self, name: str, error: BaseException | None) -> None:
        with self.changed:
            self.ended[name] = error
            self.changed.notify_all()


class Stream:
    """Traffic that goes on while the node is attacked."""

    def __init__(self, node: Node) -> None:
        self._links = [connection(node.connect("stream", purpose)) for purpose in (Purpose(), DATA)]
        self._rounds = 0
        self._error: BaseException | None = None
        self._stop = False
        self._turned = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        control, data = self._links
        words = random.Random(5).randbytes(CHUNK + 8192)
        try:
            while not self._stop:
                control.send([encode_message(Ping(self._rounds))], WAIT)
                pong = control.receive(WAIT)
                assert pong is not None
                assert decode_message(pong) == Pong(self._rounds, 0.5)
                frame = words[self._rounds % 100 :] if self._rounds % 20 == 0 else words[:8192]
                data.send([frame], WAIT)
                assert data.receive(WAIT) == frame
                with self._turned:
                    self._rounds += 1
                    self._turned.notify_all()
        except BaseException as error:
            with self._turned:
                self._error = error
                self._turned.notify_all()

    def still_runs(self) -> None:
        """Three more rounds pass from now on."""
        with self._turned:
            goal = self._rounds + 3
            assert self._turned.wait_for(lambda: self._rounds >= goal or self._error, WAIT)
            assert self._error is None

    def close(self) -> None:
        self._stop = True
        self._thread.join(WAIT)
        for link in self._links:
            link.close()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.close()


@pytest.fixture(autouse=True)
def stream(node: Node) -> Iterator[Stream]:
    """What runs beside every test, and still runs at its end."""
    stream = Stream(node)
    stream.still_runs()
    yield stream
    try:
        stream.still_runs()
    finally:
        stream.close()


def knock(node: Node) -> tuple[socket.socket, bytes]:
    """A raw connection and the hello."""
    sock = socket.create_connection((node.address.host, node.address.port), WAIT)
    return sock, take(sock, 40)


def take(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def is_closed(sock: socket.socket) -> None:
    """The node hangs up without a further word."""
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""
    sock.close()


# Without a handshake, or with a wrong one.


def test_a_wrong_secret_is_not_answered(node: Node) -> None:
    """Not even with a refusal: there is nothing to learn from the acceptor."""
    sock, hello = knock(node)
    sock.sendall(Dialer(ClusterSecret(b"a guess of a secret"), hello).claim(COORDINATOR))
    is_closed(sock)
    node.counted("wrong_secret")


@pytest.mark.parametrize(
    "words",
    [
        (12).to_bytes(8, "little") + b"{}" + bytes(26),  # a frame
        b"MLXP\1\1" + bytes(40),  # a message of the pipeline
        b"MLXC" + bytes(100),
    ],
)
def test_without_a_handshake_there_is_no_way_in(node: Node, words: bytes) -> None:
    """Whatever is said instead."""
    sock, _ = knock(node)
    sock.sendall(words)
    is_closed(sock)
    reason = "version" if words.startswith(b"MLXC") else "bad_hello"
    node.counted(reason)


@pytest.mark.parametrize("length", [32769, 1 << 24, 0xFFFFFFFF])
def test_an_oversized_claim_is_refused_by_its_length(node: Node, length: int) -> None:
    """Nothing is waited for, nothing is allocated."""
    sock, _ = knock(node)
    sock.sendall(b"MLXC" + struct.pack("<I32sI", 5, bytes(32), length))
    is_closed(sock)
    node.counted("bad_hello")


def test_a_nonce_that_is_reflected_proves_nothing(node: Node) -> None:
    """The node's own hello, as the beginning of a claim, with any proof one has seen."""
    sock, hello = knock(node)
    sock.sendall(hello + struct.pack("<I", 2) + b"{}" + bytes(32))
    is_closed(sock)
    node.counted("wrong_secret")


def test_a_claim_cannot_be_passed_on_to_another_connection(node: Node) -> None:
    """A dialer that was lured to a false acceptor gives it nothing that the node takes."""
    _, other_hello = knock(node)
    claim = Dialer(SECRET, other_hello).claim(COORDINATOR)
    sock, _ = knock(node)
    sock.sendall(claim)
    is_closed(sock)
    node.counted("wrong_secret")


def test_an_acceptor_that_echoes_is_no_node(node: Node) -> None:
    """A dialer is not convinced by its own claim."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo() -> None:
            with listener.accept()[0] as sock:
                sock.sendall(b"MLXC\5\0\0\0" + bytes(32))
                claim = sock.recv(1 << 16)
                body = claim[44:]
                sock.sendall(struct.pack("<BI", 0, len(body) - 32) + body)

        echoing = threading.Thread(target=echo)
        echoing.start()
        with pytest.raises(SecretMismatch):
            node.connect("lured", Purpose(), listener.getsockname()[1])
        echoing.join(WAIT)


# In the middle of a connection of two nodes.


@attrs.define
class Between:
    """Passes on what a dialer and the node say, and does something to it.

    Args:
        verdict: Changes the verdict.
        frames: Is given the dialer's first three frames, and returns what to send instead; then
            the dialer is cut off.

    Attributes:
        claim: The dialer's, for later.
    """

    node: Node
    verdict: Callable[[bytes], bytes] = lambda verdict: verdict
    frames: Callable[[list[bytes]], bytes] | None = None
    claim: bytes = b""
    listener: socket.socket = attrs.field(
        init=False, factory=lambda: socket.create_server(("127.0.0.1", 0))
    )

    def __enter__(self) -> int:
        """The port to dial."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return int(self.listener.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._thread.join(WAIT)
        self.listener.close()

    def _run(self) -> None:
        node, hello = knock(self.node)
        with self.listener.accept()[0] as dialer, node:
            dialer.settimeout(WAIT)
            dialer.sendall(hello)
            head = take(dialer, 44)
            self.claim = head + take(dialer, struct.unpack("<I", head[40:])[0] + 32)
            node.sendall(self.claim)
            head = take(node, 5)
            answer = head + take(node, struct.unpack("<I", head[1:])[0] + 32)
            dialer.sendall(self.verdict(answer))
            if self.frames is not None:
                frames = []
                for _ in range(3):
                    header = take(dialer, HEADER)
                    size = sealed_size(int.from_bytes(header, "little"))
                    frames.append(header + take(dialer, size))
                with contextlib.suppress(OSError):
                    node.sendall(self.frames(frames))
                    node.shutdown(socket.SHUT_WR)
                with contextlib.suppress(OSError):
                    while node.recv(1 << 16):
                        pass

    _thread: threading.Thread = attrs.field(init=False)


def test_a_refusal_cannot_be_turned_into_a_welcome(node: Node) -> None:
    """The verdict is a part of what the acceptor proves."""
    with (
        Between(node, verdict=lambda answer: b"\0" + answer[1:]) as port,
        pytest.raises(SecretMismatch),
    ):
        node.connect("unwanted", Purpose(), port)
    node.counted("refused")


def test_a_replayed_handshake_opens_nothing(node: Node) -> None:
    """All that a genuine dialer said, said again to the same node."""
    between = Between(node)
    with between as port:
        node.connect("genuine", Purpose(), port).close()
    node.wait_for(lambda: "genuine" in node.ended)
    sock, _ = knock(node)
    sock.sendall(between.claim)
    is_closed(sock)
    node.counted("wrong_secret")


def bit_flipped(frame: bytes, position: int) -> bytes:
    changed = bytearray(frame)
    changed[position] ^= 1
    return bytes(changed)


# What is done to three frames, and how many of them may arrive.
TAMPERINGS: dict[str, tuple[Callable[[list[bytes]], bytes], int]] = {
    "replayed": (lambda f: f[0] + f[0], 1),
    "reordered": (lambda f: f[0] + f[2] + f[1], 1),
    "dropped": (lambda f: f[0] + f[2], 1),
    "injected": (lambda f: f[0] + (3).to_bytes(8, "little") + os.urandom(3 + TAG) + f[1], 1),
    "truncated": (lambda f: f[0] + f[1][:-1], 1),
    "header truncated": (lambda f: f[0] + f[1][:3], 1),
    "text flipped": (lambda f: f[0] + bit_flipped(f[1], HEADER), 1),
    "tag flipped": (lambda f: f[0] + f[1] + bit_flipped(f[2], -1), 2),
    "length flipped": (lambda f: f[0] + bit_flipped(f[1], 0) + f[2], 1),
    "oversized": (lambda f: f[0] + b"\xff" * 8 + f[1][8:], 1),
    "as large as allowed": (lambda f: f[0] + (1 << 20).to_bytes(8, "little") + bytes(1 << 21), 1),
    "merged": (lambda f: merged(f[0], f[1]) + f[2], 0),
}


def merged(first: bytes, second: bytes) -> bytes:
    length = int.from_bytes(first[:8], "little") + int.from_bytes(second[:8], "little")
    return length.to_bytes(8, "little") + first[8:] + second[8:]


@pytest.mark.parametrize("purpose", [Purpose(), DATA], ids=["control", "data"])
@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_tampering_with_frames_ends_the_connection(
    node: Node, tampering: str, purpose: Purpose
) -> None:
    """What came before the first forged byte arrives; nothing else does."""
    tamper, arriving = TAMPERINGS[tampering]
    frames = [encode_message(Ping(number)) for number in (11, 12, 13)]
    with Between(node, frames=tamper) as port:
        link = connection(node.connect("victim", purpose, port))
        for frame in frames:
            link.send([frame], WAIT)
        node.wait_for(lambda: "victim" in node.ended)
    link.close()
    delivered = [json.loads(text)["number"] for text in node.delivered["victim"]]
    assert delivered == [11, 12, 13][:arriving]
    assert isinstance(node.ended["victim"], MlxcelError)
    if purpose.kind == "control" and "truncated" not in tampering:
        assert isinstance(node.ended["victim"], WireError)
        node.counted("forged")


# Many at once.


@contextlib.contextmanager
def flat_memory() -> Iterator[None]:
    """What is allocated within stays below 12 MiB at every moment."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 12 << 20


def test_600_idle_connections_keep_nobody_out(node: Node, stream: Stream) -> None:
    """Only 64 of them stay, and one who knows the secret gets in at once."""
    with contextlib.ExitStack() as strangers, flat_memory():
        for _ in range(600):
            where = (node.address.host, node.address.port)
            strangers.enter_context(socket.create_connection(where, WAIT))
        node.connect("late", Purpose()).close()
        stream.still_runs()
    counts = node.gate.counts
    assert counts.pushed_out + counts.timeout >= 600 - 64


def test_slow_strangers_run_out_of_time(node: Node, stream: Stream) -> None:
    """A byte now and then does not keep a place at the door."""
    strangers = [knock(node)[0] for _ in range(40)]
    claim = b"MLXC" + struct.pack("<I32sI", 5, bytes(32), 32768)
    pause = threading.Event()
    for position in range(int(3 * SECONDS / 0.05)):
        for sock in strangers:
            with contextlib.suppress(OSError):
                sock.sendall(claim[position : position + 1])
        pause.wait(0.05)
    for sock in strangers:
        is_closed(sock)
    node.counted("timeout", 40)
    node.connect("late", Purpose()).close()


def test_floods_of_garbage_do_not_disturb(node: Node, stream: Stream) -> None:
    """Hundreds of strangers who send what they can, from several threads."""
    total, threads = 400, 4

    def flood(seed: int) -> None:
        garbage = random.Random(seed)
        for _ in range(total // threads):
            with contextlib.suppress(OSError):
                sock = socket.create_connection((node.address.host, node.address.port), WAIT)
                with sock:
                    sock.sendall(garbage.randbytes(60_000))
                    sock.recv(100)

    with flat_memory():
        flooding = [threading.Thread(target=flood, args=(seed,)) for seed in range(threads)]
        for thread in flooding:
            thread.start()
        stream.still_runs()
        node.connect("late", Purpose()).close()
        for thread in flooding:
            thread.join(WAIT)
    counts = node.gate.counts
    assert counts.bad_hello + counts.gone + counts.pushed_out >= total * 0.9
    assert counts.accepted == 3


# At the other door of a peer: HTTP, where everybody may knock.


def test_strangers_at_the_http_port_keep_no_node_out(node: Node, stream: Stream) -> None:
    """Of 200 who send half a request few stay, as open files are what the gate needs too."""

    async def open_door() -> tuple[web.AppRunner, int]:
        runner = make_runner(web.Application())
        await runner.setup()
        sock = bind("127.0.0.1", 0)
        await Site(runner, sock, MOST_CONNECTIONS).start()
        return runner, sock.getsockname()[1]

    runner, port = node.call(open_door())
    with contextlib.ExitStack() as strangers, flat_memory():
        selector = strangers.enter_context(selectors.DefaultSelector())
        for _ in range(200):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port), WAIT))
            stranger.sendall(b"GET /health HTT")
            selector.register(stranger, selectors.EVENT_READ)
        gone = 0
        while gone < 200 - MOST_CONNECTIONS:
            ready = selector.select(WAIT)
            assert ready, gone
            for key, _ in ready:
                selector.unregister(key.fileobj)
                gone += 1
        node.connect("late", Purpose()).close()
        stream.still_runs()
    node.call(runner.cleanup())
