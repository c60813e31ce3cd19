"""The gate: who comes in, what strangers may cost, and what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from typing import Any

import attrs
import pytest

from mlxcel.cluster import gate as gate_module
from mlxcel.cluster.addresses import Address
from mlxcel.cluster.dial import dial
from mlxcel.cluster.gate import Gate, GateCounts, GateLimits
from mlxcel.cluster.handshake import Accept, OverCapacity, Refuse, Verdict
from mlxcel.cluster.introduction import Introduction, Purpose
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.session import Session
from mlxcel.cluster.sockets import name_of
from mlxcel.errors import ListenError, PeerFull, PeerRefused, Unreachable

SECRET = ClusterSecret(b"the secret of this test")
PEER = Introduction("peer", "peer", "c", {}, {}, ("llama",), memory=7)
COORDINATOR = attrs.evolve(PEER, node="coordinator", role="coordinator")
LOOPBACK = Address("127.0.0.1", 0)
WAIT = 10.0


class Door:
    """A gate, and the sessions that came in."""

    def __init__(self) -> None:
        self.sessions: asyncio.Queue[Session] = asyncio.Queue()
        self.gate: Gate
        self.address: Address

    async def come_in(self, session: Session) -> None:
        self.sessions.put_nowait(session)

    async def dial(self, **change: Any) -> Session:
        return await dial(self.address, SECRET, attrs.evolve(COORDINATOR, **change), WAIT)

    async def knock(self) -> socket.socket:
        """A connection that has seen the hello and says nothing."""
        sock = socket.socket()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (self.address.host, self.address.port))
        assert len(await loop.sock_recv(sock, 100)) == 40
        return sock

    async def counted(self, **expected: int) -> None:
        """Wait until these and no other outcomes are counted."""
        while self.gate.counts != GateCounts(**expected):
            assert all(
                value <= expected.get(name, 0)
                for name, value in attrs.asdict(self.gate.counts).items()
            ), self.gate.counts
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def a_door(
    judge: Callable[[Introduction], Verdict] = lambda _: Accept(),
    on_session: Callable[[Session], Awaitable[None]] | None = None,
    limits: GateLimits | None = None,
    address: Address = LOOPBACK,
) -> AsyncIterator[Door]:
    door = Door()
    door.gate = Gate(SECRET, lambda: PEER, judge, on_session or door.come_in, limits)
    door.address = await door.gate.listen(address)
    async with asyncio.timeout(WAIT):
        yield door
    await door.gate.close()
    while not door.sessions.empty():
        door.sessions.get_nowait().close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_both_ends_know_each_other() -> None:
    """A session has the other's introduction and address, and keys that fit."""

    async def test() -> None:
        async with a_door() as door:
            purpose = Purpose("data", "s", "0-1", "pp_activation")
            ours = await door.dial(purpose=purpose)
            theirs = await door.sessions.get()
            assert ours.peer == PEER
            assert theirs.peer == attrs.evolve(COORDINATOR, purpose=purpose)
            assert ours.keys.send == theirs.keys.receive
            assert ours.address == str(door.address)
            assert theirs.address == name_of(ours.sock.getsockname())
            assert not ours.sock.getblocking() and not theirs.sock.getblocking()
            ours.close()
            theirs.close()
            await door.counted(accepted=1)

    run(test)


def test_what_the_gate_says_of_itself_is_asked_anew() -> None:
    """Free memory changes."""

    async def test() -> None:
        memory = iter([1, 2])
        gate = Gate(
            SECRET,
            lambda: attrs.evolve(PEER, memory=next(memory)),
            lambda _: Refuse("no"),
            Door().come_in,
        )
        address = await gate.listen(LOOPBACK)
        for _ in range(2):
            with pytest.raises(PeerRefused):
                await dial(address, SECRET, COORDINATOR, WAIT)
        assert list(memory) == []
        await gate.close()

    run(test)


def test_verdicts_reach_the_dialer() -> None:
    """The judge sees who dials; its reason is in the dialer's error."""

    async def test() -> None:
        def judge(dialer: Introduction) -> Verdict:
            return Refuse("wrong cluster 'x'") if dialer.cluster == "x" else OverCapacity()

        async with a_door(judge) as door:
            with pytest.raises(PeerRefused, match="wrong cluster 'x'"):
                await door.dial(cluster="x")
            with pytest.raises(PeerFull):
                await door.dial()
            await door.counted(refused=1, over_capacity=1)

    run(test)


@pytest.mark.parametrize("end", [Session.close, lambda s: s.take_socket().close()])
def test_sessions_are_capped_and_make_room_again(end: Callable[[Session], None]) -> None:
    """One too many gets an authenticated answer; closed and handed-over ones count no more."""

    async def test() -> None:
        async with a_door(limits=GateLimits(sessions=1)) as door:
            (await door.dial()).close()
            first = await door.sessions.get()
            with pytest.raises(PeerFull):
                await door.dial()
            end(first)
            first.close()
            (await door.dial()).close()
            await door.counted(accepted=2, over_capacity=1)

    run(test)


def test_the_next_stranger_pushes_out_the_oldest() -> None:
    """Whoever does not hurry makes room, and sees it at once; others stay."""

    async def test() -> None:
        async with a_door(limits=GateLimits(pending=2, seconds=WAIT)) as door:
            loop = asyncio.get_running_loop()
            oldest, other = await door.knock(), await door.knock()
            newest = await door.knock()
            with pytest.raises(ConnectionResetError):
                await loop.sock_recv(oldest, 1)
            await door.counted(pushed_out=1)
            (await door.dial()).close()
            with pytest.raises(ConnectionResetError):
                await loop.sock_recv(other, 1)
            await door.counted(pushed_out=2, accepted=1)
            for sock in (oldest, other, newest):
                sock.close()

    run(test)


def test_a_stranger_has_no_time_to_lose() -> None:
    """Silence and single bytes end at the deadline alike."""

    async def test() -> None:
        async with a_door(limits=GateLimits(seconds=0.05)) as door:
            loop = asyncio.get_running_loop()
            silent, slow = await door.knock(), await door.knock()
            await loop.sock_sendall(slow, b"MLXC")
            for sock in (silent, slow):
                with pytest.raises(ConnectionResetError):
                    await loop.sock_recv(sock, 1)
                sock.close()
            await door.counted(timeout=2)

    run(test)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "bad_hello"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "bad_hello"),
        (b"MLXC\6\0\0\0", "version"),
        (b"MLXC\5\0\0\0" + bytes(32) + b"\xff\xff\xff\xff", "bad_hello"),
        (b"MLXC\5\0\0\0" + bytes(32) + b"\2\0\0\0{}" + bytes(32), "wrong_secret"),
    ],
)
def test_a_wrong_word_ends_it(words: bytes, reason: str) -> None:
    """As soon as it is clear that no claim comes, and without an answer."""

    async def test() -> None:
        async with a_door() as door:
            loop = asyncio.get_running_loop()
            sock = await door.knock()
            await loop.sock_sendall(sock, words)
            with contextlib.suppress(ConnectionResetError):
                assert await loop.sock_recv(sock, 1) == b""
            await door.counted(**{reason: 1})
            sock.close()

    run(test)


def test_a_stranger_who_leaves_is_counted() -> None:
    """Hanging up within the handshake is no error of the node."""

    async def test() -> None:
        async with a_door() as door:
            (await door.knock()).close()
            await door.counted(gone=1)

    run(test)


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A flood is one line per reason, and the line holds nothing that strangers chose."""

    async def test() -> None:
        async with a_door() as door:
            loop = asyncio.get_running_loop()
            for _ in range(30):
                sock = await door.knock()
                await loop.sock_sendall(sock, b"evil words" * 5)
                sock.close()
            await door.counted(bad_hello=30)

    with caplog.at_level(logging.DEBUG):
        run(test)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("mlxcel")]
    assert len(lines) == 1
    assert "evil" not in lines[0]


@pytest.mark.parametrize("where", ["judge", "on_session"])
def test_errors_of_its_owner_do_not_end_the_gate(where: str) -> None:
    """They are logged and counted, the connection ends, and the next one is met as usual."""

    async def test() -> None:
        angry = {where}

        def judge(_: Introduction) -> Verdict:
            if "judge" in angry:
                angry.clear()
                raise RuntimeError("the judge is angry")
            return Accept()

        async def on_session(session: Session) -> None:
            if "on_session" in angry:
                angry.clear()
                raise RuntimeError("nobody at home")
            await door.come_in(session)

        async with a_door(judge, on_session) as door:
            loop = asyncio.get_running_loop()
            session = await door.dial()  # a second time, where the judge was angry
            if where == "on_session":
                assert await loop.sock_recv(session.sock, 1) == b""
                session.close()
                session = await door.dial()
            await door.sessions.get()
            session.close()
            await door.counted(failed=1, accepted=1 + (where == "on_session"))

    run(test)


def test_too_many_open_files_do_not_make_it_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, gives up its oldest stranger, and goes on when there is room again."""
    monkeypatch.setattr(gate_module, "PAUSE", 0.01)

    async def test() -> None:
        loop = asyncio.get_running_loop()
        accept, full, times = loop.sock_accept, [False], []

        async def sock_accept(listener: socket.socket) -> Any:
            if full[0]:
                times.append(loop.time())
                full[0] = len(times) < 5
                raise OSError(errno.EMFILE, "Too many open files")
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", sock_accept)
        async with a_door(limits=GateLimits(seconds=WAIT)) as door:
            stranger = await door.knock()
            full[0] = True
            (await door.dial()).close()  # accepted as was begun before; from then on it is full
            with pytest.raises(ConnectionResetError):
                await loop.sock_recv(stranger, 1)
            (await door.dial()).close()
            assert min(b - a for a, b in pairwise(times)) > 0.009
            await door.counted(accepted=2, failed=5, pushed_out=1)
            stranger.close()

    run(test)


def test_an_address_in_use_is_named() -> None:
    """The error says which address, why, and which flag."""

    async def test() -> None:
        async with a_door() as door:
            other = Gate(SECRET, lambda: PEER, lambda _: Accept(), door.come_in)
            with pytest.raises(
                ListenError,
                match=f"{door.address}: Address already in use. .*--cluster-control-addr",
            ):
                await other.listen(door.address)

    run(test)


def test_ipv6_works() -> None:
    """Listening, dialling and the names of both ends."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def test() -> None:
        async with a_door(address=Address("::1", 0)) as door:
            session = await door.dial()
            assert session.address.startswith("[::1]:")
            assert (await door.sessions.get()).address.startswith("[::1]:")
            session.close()

    run(test)


def test_a_closed_gate_is_closed() -> None:
    """Strangers are sent away, nobody new is met, and sessions live on."""

    async def test() -> None:
        async with a_door(limits=GateLimits(seconds=WAIT)) as door:
            loop = asyncio.get_running_loop()
            session, stranger = await door.dial(), await door.knock()
            inside = await door.sessions.get()
            await door.gate.close()
            with contextlib.suppress(ConnectionResetError):
                assert await loop.sock_recv(stranger, 1) == b""
            with pytest.raises(Unreachable):
                await door.dial()
            await loop.sock_sendall(inside.sock, b"still here")
            assert await loop.sock_recv(session.sock, 10) == b"still here"
            for end in (session, inside, stranger):
                end.close()

    run(test)


def test_a_name_is_listened_at_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dialer may come by any of its addresses, and the operator hears if all are loopback."""
    try:
        socket.create_server(("127.0.0.2", 0)).close()
    except OSError:
        pytest.skip("this machine has one loopback address")

    async def test() -> None:
        async def getaddrinfo(host: str, port: int, **_: object) -> list[Any]:
            hosts = ["127.0.0.2", "127.0.0.1"] if host == "myself" else [host]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        async with a_door(address=Address("myself", 0)) as door:
            assert door.address.host == "myself"
            assert "'myself' is 127.0.0.2:" in str(door.gate.doubt)
            for host in ("127.0.0.1", "127.0.0.2"):
                session = await dial(Address(host, door.address.port), SECRET, COORDINATOR, WAIT)
                session.close()
                (await door.sessions.get()).close()
            await door.counted(accepted=2)

    run(test)


def test_a_connection_that_the_system_gives_up_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no stranger who took his time."""

    async def receive(_: object) -> bytes:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(gate_module, "_receive_claim", receive)

    async def test() -> None:
        async with a_door() as door:
            (await door.knock()).close()
            await door.counted(gone=1)

    run(test)
