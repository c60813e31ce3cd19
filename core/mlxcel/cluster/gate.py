"""The one listening socket of a node: strangers come in, sessions come out.

Nobody is trusted before the handshake is over, so everything until then is bounded: how many
may be at it, how long, and how many bytes they may send. All of it runs in the event loop, and
a stranger costs no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable

import attrs

from mlxcel.cluster.handshake import (
    CLAIM_PREFIX,
    Accept,
    Acceptor,
    OtherVersion,
    OverCapacity,
    Refuse,
    Verdict,
    WrongProof,
    check_version,
    claim_size,
)
from mlxcel.cluster.introduction import PROTOCOL_VERSION, Introduction
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.session import Session
from mlxcel.cluster.sockets import name_of, prepare, read_exactly
from mlxcel.errors import AddressError, WireError
from mlxcel.observe.limited_log import LimitedLog

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
    """What became of the connections of a gate, each counted once when that was clear.

    ``bad_hello`` did not speak the protocol, ``version`` another version of it; ``gone`` hung
    up before the end; ``pushed_out`` had to make room for a newcomer. ``failed`` could not be
    accepted or handed on, which is this node's own fault.
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
        self._secret = secret
        self._introduce = introduce
        self._judge = judge
        self._on_session = on_session
        self._limits = limits or GateLimits()
        self._sessions = 0
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: dict[asyncio.Task[None], None] = {}  # oldest first
        self._complaints = LimitedLog(_log)

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Begin to accept at ``host`` (a name or an IP address) and ``port``, 0 for any free one.

        Returns:
            The IP address and the port that it listens at.

        Raises:
            AddressError: It cannot listen there.
        """
        ...

    async def close(self) -> None:
        """Stop listening and end every handshake; sessions that were handed on stay open."""
