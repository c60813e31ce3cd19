"""Connect to another node and prove to each other that both know the secret."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket

from aiohappyeyeballs import start_connection

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.handshake import (
    HELLO_SIZE,
    OTHER_FIELDS,
    PREFIX,
    VERDICT_PREFIX,
    Dialer,
    Misunderstood,
    OtherVersion,
    OverCapacity,
    Refuse,
    WrongProof,
    check_version,
    farewell,
    verdict_size,
)
from mlxcel.cluster.introduction import PROTOCOL_VERSION, Introduction
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.session import Session
from mlxcel.cluster.sockets import hang_up, has_expired, read_exactly, reason_of
from mlxcel.errors import (
    DeadlineError,
    NotANode,
    PeerFull,
    PeerRefused,
    SecretMismatch,
    Unreachable,
    VersionMismatch,
    WireError,
)
from mlxcel.transport.tcp_options import set_tcp_options

ATTEMPTS = 3
"""How often to dial a node that resets the connection: strangers may have crowded this one out."""

PAUSE = 0.05
STAGGER = 0.25
"""Seconds after which the next address of a name is tried too."""


async def dial(
    address: Address, secret: ClusterSecret, introduction: Introduction, timeout: float
) -> Session:
    """An authenticated connection to the node at ``address``, within ``timeout`` seconds.

    Args:
        introduction: What to say of this node; its ``purpose`` says what the connection is for.

    Raises:
        Unreachable: Nothing answers there, or the name is unknown.
        NotANode: Something else listens there.
        VersionMismatch: The node speaks another protocol version; both are in the error. Or it is
            of another version of mlxcel, and the two do not understand each other.
        SecretMismatch: It has another secret.
        PeerFull: It has no room for another connection.
        PeerRefused: It refuses this node; ``problem`` holds its reason.
        DeadlineError: It did not answer in time.
        TooMuchToSay: This node's own introduction is too large.
    """
    until = asyncio.get_running_loop().time() + timeout
    for attempt in range(1, ATTEMPTS + 1):
        try:
            async with asyncio.timeout_at(until):
                sock = await _connect(address)
        except TimeoutError:
            raise DeadlineError(
                str(address),
                "a connection",
                timeout,
                "Check that the address is right, that the peer runs, and that no firewall on "
                "the way drops its port.",
            ) from None
        try:
            async with asyncio.timeout_at(until):
                return await _handshake(sock, address, secret, introduction)
        except BaseException as error:
            hang_up(sock)
            if has_expired(error):
                raise DeadlineError(
                    str(address),
                    "the handshake",
                    timeout,
                    "Something listens there. If it is a peer, it hangs or is stopped; else it is "
                    "the port of another program.",
                ) from None
            if not isinstance(error, OSError):
                raise
            if attempt == ATTEMPTS:
                raise Unreachable(
                    str(address),
                    f"it broke the connection {ATTEMPTS} times ({reason_of(error)}).",
                    "Too many strangers may be at its door, or a firewall intervenes; try again.",
                ) from error
        await asyncio.sleep(PAUSE)
    raise AssertionError("the last attempt returns or raises")


async def _connect(address: Address) -> socket.socket:
    where = str(address)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(
            where,
            f"its name cannot be resolved ({reason_of(error)}).",
            "Correct the name, or give an IP address.",
        ) from error
    try:
        sock = await start_connection(found, happy_eyeballs_delay=STAGGER)
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            problem = "nothing listens there."
        else:
            text = os.strerror(error.errno) if error.errno else str(error)
            problem = f"it cannot be reached ({text})."
        raise Unreachable(
            where,
            problem,
            f"Start the peer on that machine with --pp-peer --cluster-control-addr {where}, or "
            f"let its firewall pass the port.",
        ) from error
    set_tcp_options(sock)
    return sock


async def _handshake(
    sock: socket.socket, address: Address, secret: ClusterSecret, introduction: Introduction
) -> Session:
    """The dialer's side. Raises what :func:`dial` does; OSError if it may be tried again."""
    loop = asyncio.get_running_loop()
    where = str(address)
    no_node = NotANode(
        where,
        "what listens there is no mlxcel node of a cluster.",
        "Give the address that the peer prints when it starts; its HTTP port is another one.",
    )
    try:
        hello = await read_exactly(sock, PREFIX)
        check_version(hello)
        hello += await read_exactly(sock, HELLO_SIZE - PREFIX)
        dialer = Dialer(secret, hello)
    except OtherVersion as other:
        with contextlib.suppress(OSError):
            sock.recv(HELLO_SIZE)  # what is unread at the close would reset the connection
            await loop.sock_sendall(sock, farewell())  # so that its operator learns it too
        raise VersionMismatch(
            where,
            f"it speaks protocol version {other.version}, this node {PROTOCOL_VERSION}.",
            "All nodes must be upgraded together.",
            PROTOCOL_VERSION,
            other.version,
        ) from other
    except (WireError, EOFError) as error:
        raise no_node from error

    one_secret = "Give all nodes the same secret file (--cluster-secret-file)."
    claim = dialer.claim(introduction)
    try:
        await loop.sock_sendall(sock, claim)
        head = await read_exactly(sock, VERDICT_PREFIX)
        answer = head + await read_exactly(sock, verdict_size(head) - VERDICT_PREFIX)
        verdict, peer = dialer.read_verdict(answer)
    except WrongProof as error:
        raise SecretMismatch(where, "its cluster secret is not this node's.", one_secret) from error
    except EOFError as error:
        raise SecretMismatch(
            where,
            "it hung up on the proof: its secret is another one, or it is ending.",
            one_secret,
        ) from error
    except Misunderstood as error:
        raise _other_fields(where, "it says what this node does not know") from error
    except WireError as error:
        raise no_node from error
    if isinstance(verdict, OverCapacity):
        raise PeerFull(
            where,
            "it has no room for another connection.",
            "Wait until the coordinators that use it have ended, or restart the peer.",
        )
    if verdict == Refuse(OTHER_FIELDS):
        raise _other_fields(where, "it does not know what this node says")
    if isinstance(verdict, Refuse):
        raise PeerRefused(where, f"it refuses the connection: {verdict.reason}", "")
    return Session(sock, dialer.keys(), peer, where)


def _other_fields(where: str, what: str) -> VersionMismatch:
    return VersionMismatch(
        where,
        f"{what}, though both speak protocol version {PROTOCOL_VERSION}.",
        "Install one version of mlxcel on all nodes.",
        PROTOCOL_VERSION,
        PROTOCOL_VERSION,
    )
