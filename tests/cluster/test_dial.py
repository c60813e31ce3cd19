"""Dialling: every way in which it can fail says what happened and what to do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import attrs
import pytest

from mlxcel.cluster import dial as dial_module
from mlxcel.cluster import handshake as handshake_module
from mlxcel.cluster.addresses import Address
from mlxcel.cluster.dial import dial
from mlxcel.cluster.gate import Gate, GateCounts
from mlxcel.cluster.handshake import Accept, Acceptor, Refuse, TooMuchToSay
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.session import Session
from mlxcel.cluster.sockets import reset
from mlxcel.errors import (
    DeadlineError,
    NotANode,
    PeerRefused,
    SecretMismatch,
    Unreachable,
    VersionMismatch,
)

SECRET = ClusterSecret(b"the secret of this test")
OTHER = ClusterSecret(b"the secret of another one")
COORDINATOR = Introduction("coordinator", "coordinator", "c", {}, {}, ())
PEER = Introduction("peer", "peer", "c", {}, {}, ("llama",))
WAIT = 10.0

Behaviour = Callable[[socket.socket], Awaitable[None]]


@contextlib.asynccontextmanager
async def somebody(behave: Behaviour) -> AsyncIterator[Address]:
    """A program that treats each connection with ``behave`` and then closes it."""
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    async def serve() -> None:
        while True:
            sock, _ = await loop.sock_accept(listener)
            with sock:
                await behave(sock)

    task = asyncio.create_task(serve())
    yield Address("127.0.0.1", listener.getsockname()[1])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    listener.close()


def call(behave: Behaviour, timeout: float = WAIT, secret: ClusterSecret = SECRET) -> Session:
    """Dial a program that behaves so."""

    async def run() -> Session:
        async with somebody(behave) as address:
            return await dial(address, secret, COORDINATOR, timeout)

    return asyncio.run(run())


def saying(words: bytes) -> Behaviour:
    async def behave(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, words)
        with contextlib.suppress(ConnectionResetError):
            await asyncio.get_running_loop().sock_recv(sock, 1000)

    return behave


async def silent(sock: socket.socket) -> None:
    await asyncio.Event().wait()


def test_where_nothing_listens_it_says_how_to_start_a_peer() -> None:
    """The way out names the flag and the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(Unreachable, match=r"nothing listens there.*--pp-peer") as caught:
        asyncio.run(dial(address, SECRET, COORDINATOR, WAIT))
    assert caught.value.address == str(address)


def test_an_unknown_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo in a host name looks like one."""

    async def run() -> None:
        async def getaddrinfo(*_: object, **__: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        await dial(Address("mca.local", 1), SECRET, COORDINATOR, WAIT)

    with pytest.raises(Unreachable, match=r"mca.local:1: its name cannot be resolved"):
        asyncio.run(run())


def test_an_address_that_swallows_everything_is_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A firewall that drops packets: the error says that there was no connection."""

    async def start_connection(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(dial_module, "start_connection", start_connection)
    with pytest.raises(DeadlineError, match=r"10\.0\.0\.9:1.*0.01 s.*a connection.*firewall"):
        asyncio.run(dial(Address("10.0.0.9", 1), SECRET, COORDINATOR, 0.01))


def test_somebody_who_says_nothing_is_a_deadline() -> None:
    """A stopped peer, or a server that waits for its client to begin."""
    with pytest.raises(DeadlineError, match=r"the handshake.*port of another program"):
        call(silent, timeout=0.05)


@pytest.mark.parametrize(
    "words", [b"", b"MLX", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n" * 3]
)
def test_another_program_is_recognised(words: bytes) -> None:
    """Whatever it says, or if it only hangs up."""

    async def behave(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, words)

    with pytest.raises(NotANode, match=r"no mlxcel node.*HTTP port"):
        call(behave)


def test_another_version_is_told_to_both() -> None:
    """The error has both versions, and the acceptor hears ours."""

    async def run() -> bytes:
        heard: asyncio.Queue[bytes] = asyncio.Queue()

        async def behave(sock: socket.socket) -> None:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, b"MLXC" + struct.pack("<I", 6) + bytes(32))
            heard.put_nowait(await loop.sock_recv(sock, 100))

        async with somebody(behave) as address:
            with pytest.raises(VersionMismatch, match=r"6, this node 5\. All.*upgraded") as caught:
                await dial(address, SECRET, COORDINATOR, WAIT)
            assert (caught.value.ours, caught.value.theirs) == (5, 6)
            return await heard.get()

    assert asyncio.run(run()) == b"MLXC\5\0\0\0"


def test_another_secret_is_recognised() -> None:
    """A real gate closes without a word, and is asked only once."""

    async def run() -> None:
        async def on_session(session: Session) -> None:
            session.close()

        gate = Gate(OTHER, lambda: PEER, lambda _: Accept(), on_session)
        address = await gate.listen(Address("127.0.0.1", 0))
        with pytest.raises(SecretMismatch, match="--cluster-secret-file"):
            await dial(address, SECRET, COORDINATOR, WAIT)
        assert gate.counts.wrong_secret == 1
        await gate.close()

    asyncio.run(run())


def impostor(forge: Callable[[bytes], bytes]) -> Behaviour:
    """A gate whose verdict is changed on the way."""

    async def behave(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        acceptor = Acceptor(SECRET)
        await loop.sock_sendall(sock, acceptor.hello)
        acceptor.read_claim(await loop.sock_recv(sock, 1 << 16))
        await loop.sock_sendall(sock, forge(acceptor.verdict(Accept(), PEER)))

    return behave


@pytest.mark.parametrize(
    "forge",
    [
        lambda verdict: b"\2" + verdict[1:],
        lambda verdict: verdict[:-1] + bytes([verdict[-1] ^ 1]),
        lambda verdict: verdict[:-1],
    ],
)
def test_a_forged_verdict_counts_for_nothing(forge: Callable[[bytes], bytes]) -> None:
    """Flipped or cut short: who sends it does not know the secret."""
    with pytest.raises(SecretMismatch):
        call(impostor(forge))


def test_a_verdict_is_read_within_bounds() -> None:
    """An impostor's length costs no memory."""
    with pytest.raises(NotANode):
        call(impostor(lambda verdict: b"\0\xff\xff\xff\xff" + verdict[5:]))


def test_a_reason_cannot_play_with_the_terminal() -> None:
    """Control characters are shown as escapes, but ends of lines."""

    async def run() -> None:
        async def on_session(session: Session) -> None:
            session.close()

        gate = Gate(SECRET, lambda: PEER, lambda _: Refuse("no\x1b[2J\r\nway"), on_session)
        address = await gate.listen(Address("127.0.0.1", 0))
        try:
            await dial(address, SECRET, COORDINATOR, WAIT)
        finally:
            await gate.close()

    with pytest.raises(PeerRefused, match=r"refuses the connection: no\\x1b\[2J\\x0d\nway"):
        asyncio.run(run())


def crowded(times: int) -> tuple[Behaviour, list[None]]:
    """A gate whose first ``times`` strangers are pushed out, and a list of those."""
    out: list[None] = []

    async def behave(sock: socket.socket) -> None:
        if len(out) < times:
            out.append(None)
            await asyncio.get_running_loop().sock_sendall(sock, Acceptor(SECRET).hello)
            reset(sock)
            return
        await impostor(lambda verdict: verdict)(sock)

    return behave, out


def test_who_is_crowded_out_tries_again() -> None:
    """A reset within the handshake is no verdict."""
    behave, out = crowded(2)
    assert call(behave).peer == PEER
    assert len(out) == 2


def test_but_not_for_ever() -> None:
    """After a few attempts the error says what happens."""
    behave, out = crowded(100)
    with pytest.raises(Unreachable, match=r"broke the connection 3 times.*strangers"):
        call(behave)
    assert len(out) == 3


def in_turn(gate: Gate, introduction: Introduction = COORDINATOR) -> Session:
    """Dial ``gate``."""

    async def run() -> Session:
        address = await gate.listen(Address("127.0.0.1", 0))
        try:
            return await dial(address, SECRET, introduction, WAIT)
        finally:
            await gate.close()

    return asyncio.run(run())


async def unwanted(session: Session) -> None:
    session.close()


def test_a_field_that_the_peer_does_not_know_is_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret is right, so both are told to install one version, and nothing of the secret."""
    write = handshake_module._write

    def newer(body: object) -> bytes:
        text = write(body)  # type: ignore[arg-type]
        return text[:-1] + b',"new":1}' if isinstance(body, Introduction) else text

    monkeypatch.setattr(handshake_module, "_write", newer)
    gate = Gate(SECRET, lambda: PEER, lambda _: Accept(), unwanted)
    with pytest.raises(VersionMismatch, match=r"not know what this node says.*one version"):
        in_turn(gate)
    assert (gate.counts.version, gate.counts.bad_hello) == (1, 0)


def test_a_field_that_the_peer_says_and_nobody_knows_is_a_version() -> None:
    """The same from the other side: the proof of the verdict is right, its body is new."""

    def newer(verdict: bytes) -> bytes:
        body = verdict[5:-32][:-1] + b',"new":1}'
        return struct.pack("<BI", 0, len(body)) + body

    async def behave(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        acceptor = Acceptor(SECRET)
        await loop.sock_sendall(sock, acceptor.hello)
        claim = await loop.sock_recv(sock, 1 << 16)
        acceptor.read_claim(claim)
        said = newer(acceptor.verdict(Accept(), PEER))
        label = b"mlxcel 5 acceptor\0"
        proof = hmac.digest(SECRET.value, label + acceptor.hello + claim + said, "sha256")
        await loop.sock_sendall(sock, said + proof)

    with pytest.raises(VersionMismatch, match="says what this node does not know"):
        call(behave)


def test_a_peer_that_has_too_much_to_say_fails_by_itself() -> None:
    """The dialer hears just that, nothing of strangers or another secret."""
    large = attrs.evolve(PEER, families=tuple(f"family-{n:040d}" for n in range(900)))
    gate = Gate(SECRET, lambda: large, lambda _: Accept(), unwanted)
    with pytest.raises(PeerRefused, match=r"refuses the connection: it has too much to say of"):
        in_turn(gate)
    assert gate.counts == GateCounts(failed=1)


def test_a_dialer_that_has_too_much_to_say_is_told() -> None:
    """Nothing is said of the peer, which has done nothing."""
    large = attrs.evolve(COORDINATOR, families=tuple(f"family-{n:040d}" for n in range(900)))
    gate = Gate(SECRET, lambda: PEER, lambda _: Accept(), unwanted)
    with pytest.raises(TooMuchToSay, match="this node has too much to say of itself: an intro"):
        in_turn(gate, large)


def test_a_peer_that_ends_within_the_handshake_may_have_the_secret() -> None:
    """The error says both that it can be."""
    with pytest.raises(SecretMismatch, match="another one, or it is ending"):
        call(impostor(lambda verdict: b""))


def test_a_connection_that_the_system_gives_up_is_no_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ETIMEDOUT is a TimeoutError too; the node is tried again, and not called silent."""

    async def read_exactly(*_: object) -> bytes:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(dial_module, "read_exactly", read_exactly)
    with pytest.raises(Unreachable, match=r"broke the connection 3 times \(Connection timed out"):
        call(silent)
