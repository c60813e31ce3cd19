"""How two nodes prove to each other that they know the secret, as bytes in and bytes out.

The acceptor speaks first. All numbers are little-endian::

    hello    acceptor to dialer   4 bytes "MLXC", u32 version, 32 bytes nonce
    claim    dialer to acceptor   4 bytes "MLXC", u32 version, 32 bytes nonce,
                                  u32 length, body, 32 bytes proof
    verdict  acceptor to dialer   u8 verdict, u32 length, body, 32 bytes proof

A proof is HMAC-SHA256 with the secret over a label of its own and all that was said so far; the
dialer's and the acceptor's labels differ, so nobody can be answered with his own words. The
bodies are JSON. What is sealed afterwards has keys that depend on the secret and on all of the
hello and the claim. docs/protocol.md describes this byte by byte.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from typing import Any

import attrs
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mlxcel.cluster.introduction import PROTOCOL_VERSION, Introduction
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.errors import WireError
from mlxcel.transport.contract import Keys
from mlxcel.wire.strict_json import strict_converter, structure
from mlxcel.wire.tensor import flat

MAGIC = b"MLXC"
NONCE = 32
PROOF = 32
MAX_BODY = 32 << 10
"""The largest body of a claim or a verdict, in bytes."""

MAX_REASON = 2000
"""The longest reason of a refusal, in characters."""

_HELLO = struct.Struct(f"<4sI{NONCE}s")
_CLAIM = struct.Struct(f"<4sI{NONCE}sI")
_VERDICT = struct.Struct("<BI")

PREFIX = 8
"""How many bytes tell the version, of a hello and of a claim."""

HELLO_SIZE = _HELLO.size
CLAIM_PREFIX = _CLAIM.size
VERDICT_PREFIX = _VERDICT.size

OTHER_FIELDS = (
    "it sends what this version does not know; install one version of mlxcel on all nodes"
)
"""The reason of a refusal where the proof is right and the body is not understood."""

FEWER_PLUGINS = "Leave out plugins that are not needed, with MLXCEL_DISABLE_PLUGINS."
"""What helps a node whose introduction is too large."""

_DIALER_PROOF = b"mlxcel 5 dialer\0"
_ACCEPTOR_PROOF = b"mlxcel 5 acceptor\0"
_DIALER_KEY = b"mlxcel 5 dialer to acceptor\0"
_ACCEPTOR_KEY = b"mlxcel 5 acceptor to dialer\0"


@attrs.frozen
class Accept:
    """The connection is welcome."""


@attrs.frozen
class OverCapacity:
    """The dialer is known, but there is no room for another connection."""


@attrs.frozen
class Refuse:
    """The dialer is known and not wanted; ``reason`` is for its operator."""

    reason: str


Verdict = Accept | OverCapacity | Refuse

_CODES: dict[type[Verdict], int] = {Accept: 0, OverCapacity: 1, Refuse: 2}


class WrongProof(WireError):
    """A proof that was not made with this secret over these bytes."""


class Misunderstood(WireError):
    """A body whose proof is right and that has not the fields that this version knows."""


class TooMuchToSay(WireError):
    """An introduction of this node's own that is larger than the protocol allows."""

    def __str__(self) -> str:
        return f"this node has too much to say of itself: {self.what}. {FEWER_PLUGINS}"


@attrs.define(eq=False)
class OtherVersion(WireError):
    """A node of another protocol version; ``version`` is the one that it speaks."""

    version: int


@attrs.frozen
class _VerdictBody:
    introduction: Introduction
    reason: str = ""


class Acceptor:
    """The acceptor's side of one handshake.

    Attributes:
        hello: What to send first.
    """

    def __init__(self, secret: ClusterSecret, nonce: bytes | None = None) -> None:
        self._secret = secret.value
        self.hello = _HELLO.pack(MAGIC, PROTOCOL_VERSION, nonce or os.urandom(NONCE))
        self._claim = b""

    def read_claim(self, claim: bytes) -> Introduction:
        """Who the dialer is; ``claim`` is the whole claim.

        Raises:
            WrongProof: It does not know the secret, or did not see this hello.
            OtherVersion: It speaks another version.
            Misunderstood: It knows the secret, and has other fields; a verdict can be given.
            WireError: The claim is malformed.
        """
        if len(claim) < CLAIM_PREFIX or len(claim) != claim_size(claim[:CLAIM_PREFIX]):
            raise WireError(f"a claim of {len(claim)} bytes")
        said, proof = claim[:-PROOF], claim[-PROOF:]
        _check(proof, self._secret, _DIALER_PROOF, self.hello, said)
        self._claim = claim
        introduction: Introduction = _read(said[CLAIM_PREFIX:], Introduction, "a claim")
        return introduction

    def verdict(self, verdict: Verdict, introduction: Introduction) -> bytes:
        """What to answer after :meth:`read_claim`; ``introduction`` is the acceptor's own.

        Raises:
            TooMuchToSay: The introduction is too large.
        """
        reason = verdict.reason[:MAX_REASON] if isinstance(verdict, Refuse) else ""
        body = _write(_VerdictBody(introduction, reason))
        said = _VERDICT.pack(_CODES[type(verdict)], len(body)) + body
        return said + _proof(self._secret, _ACCEPTOR_PROOF, self.hello, self._claim, said)

    def keys(self) -> Keys:
        """The keys of the connection, after :meth:`read_claim`."""
        dialer, acceptor = _keys(self._secret, self.hello, self._claim)
        return Keys(send=acceptor, receive=dialer)


class Dialer:
    """The dialer's side of one handshake.

    Args:
        hello: What the acceptor said first.

    Raises:
        OtherVersion: The acceptor speaks another version.
        WireError: It is no mlxcel node.
    """

    def __init__(self, secret: ClusterSecret, hello: bytes, nonce: bytes | None = None) -> None:
        read_hello(hello)
        self._secret = secret.value
        self._hello = hello
        self._nonce = nonce or os.urandom(NONCE)
        self._claim = b""

    def claim(self, introduction: Introduction) -> bytes:
        """What to answer to the hello; ``introduction`` is the dialer's own.

        Raises:
            TooMuchToSay: The introduction is too large.
        """
        body = _write(introduction)
        said = _CLAIM.pack(MAGIC, PROTOCOL_VERSION, self._nonce, len(body)) + body
        self._claim = said + _proof(self._secret, _DIALER_PROOF, self._hello, said)
        return self._claim

    def read_verdict(self, verdict: bytes) -> tuple[Verdict, Introduction]:
        """The acceptor's verdict and who it is; ``verdict`` is the whole message.

        Raises:
            WrongProof: It does not know the secret, or answers somebody else.
            Misunderstood: It knows the secret, and says what this version does not know.
            WireError: The verdict is malformed.
        """
        if len(verdict) < VERDICT_PREFIX or len(verdict) != verdict_size(verdict[:VERDICT_PREFIX]):
            raise WireError(f"a verdict of {len(verdict)} bytes")
        said, proof = verdict[:-PROOF], verdict[-PROOF:]
        _check(proof, self._secret, _ACCEPTOR_PROOF, self._hello, self._claim, said)
        body: _VerdictBody = _read(said[VERDICT_PREFIX:], _VerdictBody, "a verdict")
        match said[0]:
            case 0:
                return Accept(), body.introduction
            case 1:
                return OverCapacity(), body.introduction
            case 2:
                return Refuse(body.reason), body.introduction
        raise Misunderstood(f"unknown verdict {said[0]}")

    def keys(self) -> Keys:
        """The keys of the connection, after :meth:`claim`."""
        dialer, acceptor = _keys(self._secret, self._hello, self._claim)
        return Keys(send=dialer, receive=acceptor)


def check_introduction(introduction: Introduction) -> None:
    """Check that a node can say so much of itself.

    Raises:
        TooMuchToSay: It is larger than the protocol allows.
    """
    _write(introduction)


def read_hello(hello: bytes) -> None:
    """Check what an acceptor says first; it needs no secret.

    Raises:
        OtherVersion: It speaks another version.
        WireError: It is no mlxcel node.
    """
    if len(hello) >= PREFIX:
        check_version(hello[:PREFIX])
    if len(hello) != HELLO_SIZE:
        raise WireError(f"a hello of {len(hello)} bytes")


def check_version(prefix: bytes) -> None:
    """Check the :data:`PREFIX` bytes that both a hello and a claim begin with.

    Raises:
        OtherVersion: The sender speaks another version.
        WireError: The sender is no mlxcel node.
    """
    magic, version = struct.unpack("<4sI", prefix)
    if magic != MAGIC:
        raise WireError("the data does not begin like mlxcel's handshake")
    if version != PROTOCOL_VERSION:
        what = f"protocol version {version}; this mlxcel speaks {PROTOCOL_VERSION}"
        raise OtherVersion(what, version)


def farewell() -> bytes:
    """What a dialer of another version says instead of a claim, so that both sides know."""
    return struct.pack("<4sI", MAGIC, PROTOCOL_VERSION)


def claim_size(prefix: bytes) -> int:
    """The size of the whole claim that begins with the :data:`CLAIM_PREFIX` bytes ``prefix``.

    Raises:
        OtherVersion: The dialer speaks another version.
        WireError: It is no mlxcel node, or its body is too large.
    """
    check_version(prefix[:PREFIX])
    return CLAIM_PREFIX + _body_size(_CLAIM.unpack(prefix)[3], "a claim") + PROOF


def verdict_size(prefix: bytes) -> int:
    """The size of the whole verdict that begins with the :data:`VERDICT_PREFIX` bytes ``prefix``.

    Raises:
        WireError: Its body is too large.
    """
    return VERDICT_PREFIX + _body_size(_VERDICT.unpack(prefix)[1], "a verdict") + PROOF


def _body_size(size: int, what: str) -> int:
    if size > MAX_BODY:
        raise WireError(f"{what} with a body of {size} bytes; {MAX_BODY} are allowed")
    return size


def _proof(secret: bytes, label: bytes, *said: bytes) -> bytes:
    return hmac.digest(secret, label + b"".join(said), "sha256")


def _check(proof: bytes, secret: bytes, label: bytes, *said: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(secret, label, *said)):
        raise WrongProof("a proof that was not made with this cluster's secret")


def _keys(secret: bytes, hello: bytes, claim: bytes) -> tuple[bytes, bytes]:
    """The key from dialer to acceptor, and the one back."""
    salt = _HELLO.unpack(hello)[2] + _CLAIM.unpack_from(claim)[2]
    transcript = hashlib.sha256(hello + claim).digest()
    dialer, acceptor = (
        HKDF(SHA256(), 32, salt, label + transcript).derive(secret)
        for label in (_DIALER_KEY, _ACCEPTOR_KEY)
    )
    return dialer, acceptor


_converter = strict_converter(escaping=True)


def _read(body: bytes, cls: Any, what: str) -> Any:
    """The object in ``body``, whose proof is right."""
    try:
        return structure(_converter, flat(body), cls, f"the body of {what}")
    except WireError as error:
        raise Misunderstood(error.what) from error


def _write(body: Introduction | _VerdictBody) -> bytes:
    """``body`` as JSON.

    Raises:
        TooMuchToSay: It is larger than the protocol allows.
    """
    text = json.dumps(_converter.unstructure(body), separators=(",", ":")).encode()
    if len(text) > MAX_BODY:
        raise TooMuchToSay(f"an introduction of {len(text)} bytes; {MAX_BODY} are allowed")
    return text
