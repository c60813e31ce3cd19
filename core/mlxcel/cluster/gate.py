"""Where a node listens for others: strangers come in, sessions come out.

Nobody is trusted before the handshake is over, so everything until then is bounded: how many
may be at it, how long, and how many bytes they may send. All of it runs in the event loop, and
a stranger costs no thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine

import attrs

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.handshake import (
    CLAIM_PREFIX,
    FEWER_PLUGINS,
    OTHER_FIELDS,
    PREFIX,
    Accept,
    Acceptor,
    Misunderstood,
    OtherVersion,
    OverCapacity,
    Refuse,
    TooMuchToSay,
    Verdict,
    WrongProof,
    check_version,
    claim_size,
)
from mlxcel.cluster.introduction import PROTOCOL_VERSION, Introduction
from mlxcel.cluster.listeners import doubtful, open_listeners
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.session import Session
from mlxcel.cluster.sockets import (
    hang_up,
    has_expired,
    name_of,
    read_exactly,
    reason_of,
    reset,
)
from mlxcel.errors import ListenError, WireError
from mlxcel.observe.limited_log import LimitedLog
from mlxcel.transport.tcp_options import set_tcp_options

PAUSE = 0.1
"""Seconds to wait when the system has no room for another connection."""

_log = logging.getLogger(__name__)


@attrs.frozen
class GateLimits:
    """What a gate lets happen.

    ``pending`` strangers may be in their handshake at once; one more pushes out the oldest.
    Each has ``seconds`` for it. ``sessions`` are the authenticated connections that may be
    open at once.
    """

    pending: int = 64
    seconds: float = 2.0
    sessions: int = 256


@attrs.define
class GateCounts:
    """What became of the connections of a gate, counted when that was clear.

    ``bad_hello`` did not speak the protocol, ``version`` another version of it, or the same with
    other fields; ``gone`` hung up before the end; ``pushed_out`` had to make room for a newcomer.
    ``failed`` could not be accepted, answered or handed on, which is this node's own fault.
    ``forged`` were accepted, and later brought a frame that did not open or made no sense.
    """

    accepted: int = 0
    over_capacity: int = 0
    refused: int = 0
    wrong_secret: int = 0
    bad_hello: int = 0
    version: int = 0
    timeout: int = 0
    pushed_out: int = 0
    gone: int = 0
    failed: int = 0
    forged: int = 0


class Gate:
    """Accepts connections and does the acceptor's side of the handshake.

    Args:
        secret: Of the cluster.
        introduce: What to say of this node, asked anew for each connection.
        judge: Whether a dialer that knows the secret may come in, by its introduction.
        on_session: Gets every session that was let in, and must close it or take its socket;
            what it raises is logged and closes the session.
        limits: What strangers may cost.

    Attributes:
        counts: What became of all connections so far.
        doubt: Why other machines may not reach it, for the operator; known once it listens.
    """

    def __init__(
        self,
        secret: ClusterSecret,
        introduce: Callable[[], Introduction],
        judge: Callable[[Introduction], Verdict],
        on_session: Callable[[Session], Awaitable[None]],
        limits: GateLimits | None = None,
    ) -> None:
        self.counts = GateCounts()
        self.doubt: str | None = None
        self._secret = secret
        self._introduce = introduce
        self._judge = judge
        self._on_session = on_session
        self._limits = limits or GateLimits()
        self._sessions = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: dict[asyncio.Task[None], None] = {}  # oldest first
        self._complaints = LimitedLog(_log)

    async def listen(self, address: Address) -> Address:
        """Begin to accept at ``address``, a name's every address; port 0 stands for any free one.

        Returns:
            Where it listens, with the port.

        Raises:
            ListenError: It cannot listen there.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            listeners = open_listeners(found)
        except OSError as error:
            raise ListenError(str(address), reason_of(error)) from error
        self.doubt = doubtful(address, listeners)
        port = listeners[0].getsockname()[1]
        for listener in listeners:
            self._spawn(self._accept(listener))
        return Address(address.host, port)

    async def close(self) -> None:
        """Stop listening; end every handshake and every ``on_session`` that still runs."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    sock, where = await loop.sock_accept(listener)
                except ConnectionAbortedError:
                    self._count("gone", "a connection was gone before it could be accepted")
                    await asyncio.sleep(0)
                    continue
                except OSError as error:  # such as too many open files
                    self._count("failed", f"no connection can be accepted: {error.strerror}")
                    self._push_out()
                    await asyncio.sleep(PAUSE)
                    continue
                if len(self._pending) >= self._limits.pending:
                    self._push_out()
                self._pending[self._spawn(self._meet(sock, name_of(where)))] = None
                # sock_accept does not give way while more are waiting; others must have a turn.
                await asyncio.sleep(0)

    def _push_out(self) -> None:
        """End the oldest handshake, if there is any."""
        if self._pending:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.cancel()

    async def _meet(self, sock: socket.socket, where: str) -> None:
        """Everything that happens to one connection."""
        task = asyncio.current_task()
        assert task is not None
        session = None
        try:
            async with asyncio.timeout(self._limits.seconds):
                session = await self._handshake(sock, where)
        except asyncio.CancelledError:
            if task in self._pending:
                raise  # the gate closes
            self._count("pushed_out", f"{where} had to make room for another stranger")
            reset(sock)
        except OtherVersion as other:
            self._count(
                "version",
                f"{where} speaks protocol version {other.version}, this node {PROTOCOL_VERSION}; "
                f"all nodes must be upgraded together",
            )
        except WrongProof:
            self._count("wrong_secret", f"{where} has another cluster secret, or pretends to")
        except WireError as error:
            self._count("bad_hello", f"{where} does not speak the cluster's protocol: {error.what}")
        except (EOFError, OSError) as error:
            if has_expired(error):
                self._count("timeout", f"{where} did not finish its handshake in time")
                reset(sock)
            else:
                self._count("gone", f"{where} hung up in its handshake: {reason_of(error)}")
        except Exception:
            self._count("failed", f"{where} could not be answered")
            _log.exception("a handshake failed")
            reset(sock)
        finally:
            self._pending.pop(task, None)
            if session is None:
                hang_up(sock)
        if session is not None:
            await self._hand_on(session)

    async def _handshake(self, sock: socket.socket, where: str) -> Session | None:
        """The session, or None when the dialer was not let in and knows why.

        Raises:
            WireError, EOFError, OSError: It failed; nothing more may be said to the dialer.
        """
        loop = asyncio.get_running_loop()
        set_tcp_options(sock)
        acceptor = Acceptor(self._secret)
        await loop.sock_sendall(sock, acceptor.hello)
        claim = await _receive_claim(sock)
        try:
            peer = acceptor.read_claim(claim)
        except Misunderstood as error:
            answer = acceptor.verdict(Refuse(OTHER_FIELDS), _bare(self._introduce()))
            await loop.sock_sendall(sock, answer)
            self._count("version", f"{where} knows the secret, but {error.what}")
            return None
        verdict = self._judge(peer)
        if isinstance(verdict, Accept) and self._sessions >= self._limits.sessions:
            verdict = OverCapacity()
        introduction = self._introduce()
        try:
            answer = acceptor.verdict(verdict, introduction)
        except TooMuchToSay as error:  # the dialer is told, so that it blames nobody else
            refusal = Refuse(f"it has too much to say of itself: {error.what}. {FEWER_PLUGINS}")
            await loop.sock_sendall(sock, acceptor.verdict(refusal, _bare(introduction)))
            self._count("failed", f"{where} ({peer.node}) could not be let in: {error}")
            return None
        if not isinstance(verdict, Accept):
            await loop.sock_sendall(sock, answer)
            if isinstance(verdict, Refuse):
                self._count("refused", f"{where} ({peer.node}) was refused: {verdict.reason}")
            else:
                self._count("over_capacity", f"{where} ({peer.node}) found no room")
            return None
        self._sessions += 1
        session = Session(
            sock, acceptor.keys(), peer, where, self._one_less, lambda: self._forged(where)
        )
        try:
            await loop.sock_sendall(sock, answer)
        except BaseException:
            session.close()
            raise
        self.counts.accepted += 1
        return session

    async def _hand_on(self, session: Session) -> None:
        try:
            await self._on_session(session)
        except BaseException as error:
            session.close()
            if not isinstance(error, Exception):
                raise
            self.counts.failed += 1
            _log.exception("the session with %s failed", session.address)

    def _one_less(self) -> None:
        self._sessions -= 1

    def _forged(self, where: str) -> None:
        self._count("forged", f"the connection from {where} brought a forged frame")

    def _count(self, reason: str, text: str) -> None:
        setattr(self.counts, reason, getattr(self.counts, reason) + 1)
        self._complaints.warning(reason, text)


def _bare(introduction: Introduction) -> Introduction:
    """What is left for a refusal of a node that has much to say."""
    return Introduction(introduction.node, introduction.role, introduction.cluster, {}, {}, ())


async def _receive_claim(sock: socket.socket) -> bytes:
    """One whole claim, of which nothing is believed yet but its length.

    Raises:
        WireError: It cannot be a claim.
        EOFError, OSError: The connection ended or broke.
    """
    head = await read_exactly(sock, PREFIX)
    check_version(head)
    head += await read_exactly(sock, CLAIM_PREFIX - PREFIX)
    return head + await read_exactly(sock, claim_size(head) - CLAIM_PREFIX)
