"""What a peer that nobody knows yet says of itself: one signed datagram, bytes in and bytes out.

All numbers are little-endian::

    4 bytes "MLXB", u8 format (1), u32 protocol version, u64 time window, 16 bytes nonce, u16 port,
    u8 length of the cluster's name, u8 length of the host, u8 length of mlxcel's version,
    name, host, version, 32 bytes HMAC-SHA256 with the secret over a label and all before

The label is another than those of the handshake. The time window is Unix time divided by
:data:`WINDOW` seconds. Host and port are where the peer listens, and a beacon counts only if it
comes from that very host, so a copy that somebody else sends leads nowhere.
"""

from __future__ import annotations

import hmac
import struct
from typing import Literal

import attrs

from mlxcel.cluster.addresses import Address, parse_address
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.errors import UsageError
from mlxcel.wire.strict_json import shown

FORMAT = 1
WINDOW = 60
"""Seconds; a beacon counts in its own window, the one before and the one after."""

LARGEST = 512
"""Bytes of a datagram; whatever is longer is none of ours."""

REMEMBERED = 1 << 14
"""How many beacons are remembered, so that none counts twice."""

NONCE = 16

_MAGIC = b"MLXB"
_PROOF = 32
_LABEL = b"mlxcel beacon 1\0"
_HEAD = struct.Struct(f"<4sBIQ{NONCE}sHBBB")

Ignored = Literal["malformed", "foreign", "forged", "displaced", "stale", "replayed"]
"""Why a datagram does not count: it is no beacon; of another cluster; not signed with the secret;
sent from another host than it names; of another time; or a copy."""


@attrs.frozen
class Beacon:
    """A peer that waits: its cluster, where it listens, and what it runs."""

    cluster: str
    address: Address
    version: str
    protocol: int


def make_beacon(beacon: Beacon, secret: ClusterSecret, now: float, nonce: bytes) -> bytes:
    """The datagram for ``beacon``.

    Args:
        now: Unix time in seconds.
        nonce: :data:`NONCE` random bytes, new for every beacon.
    """
    host = beacon.address.host
    texts = [text.encode() for text in (beacon.cluster, host, beacon.version)]
    head = _HEAD.pack(
        _MAGIC,
        FORMAT,
        beacon.protocol,
        int(now) // WINDOW,
        nonce,
        beacon.address.port,
        *map(len, texts),
    )
    said = head + b"".join(texts)
    return said + _proof(secret, said)


class BeaconReader:
    """Tells the beacons of one cluster from everything else that arrives on a port.

    What costs little is checked first; memory is bounded whatever arrives.
    """

    def __init__(self, secret: ClusterSecret, cluster: str) -> None:
        self._secret = secret
        self._cluster = cluster.encode()
        self._seen: dict[bytes, None] = {}

    def read(self, datagram: bytes, sender: str, now: float) -> Beacon | Ignored:
        """The beacon in ``datagram``, or why it does not count.

        Args:
            sender: The IP address that the datagram came from.
            now: Unix time in seconds.
        """
        if not _HEAD.size + _PROOF <= len(datagram) <= LARGEST:
            return "malformed"
        magic, form, protocol, window, nonce, port, *sizes = _HEAD.unpack_from(datagram)
        said, proof = datagram[:-_PROOF], datagram[-_PROOF:]
        if (magic, form) != (_MAGIC, FORMAT) or len(said) != _HEAD.size + sum(sizes):
            return "malformed"
        name_end = _HEAD.size + sizes[0]
        host_end = name_end + sizes[1]
        if said[_HEAD.size : name_end] != self._cluster:
            return "foreign"
        if not hmac.compare_digest(proof, _proof(self._secret, said)):
            return "forged"
        if abs(window - int(now) // WINDOW) > 1:
            return "stale"
        if nonce in self._seen:
            return "replayed"
        self._remember(nonce)
        try:
            host, version = said[name_end:host_end].decode(), said[host_end:].decode()
            address = parse_address(f"{host}:{port}", "beacon")
        except (UnicodeDecodeError, UsageError):
            return "malformed"
        if address.host != sender:
            return "displaced"
        return Beacon(self._cluster.decode(), address, shown(version), protocol)

    def _remember(self, nonce: bytes) -> None:
        while len(self._seen) >= REMEMBERED:
            del self._seen[next(iter(self._seen))]  # the oldest
        self._seen[nonce] = None


def _proof(secret: ClusterSecret, said: bytes) -> bytes:
    return hmac.digest(secret.value, _LABEL + said, "sha256")
