"""A coordinator's side of discovery: which peers there are."""

from __future__ import annotations

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable

import attrs

from mlxcel import __version__
from mlxcel.cluster.addresses import Address
from mlxcel.cluster.announce import INTERVAL
from mlxcel.cluster.beacon import LARGEST, Beacon, BeaconReader
from mlxcel.cluster.introduction import PROTOCOL_VERSION
from mlxcel.cluster.options import ClusterOptions
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.errors import ClusterVersionError, DiscoveryError, PortTaken

RECEIVE_BUFFER = 1 << 20
"""Bytes of datagrams that may wait to be read, so that a burst of others' drops few of ours."""

SETTLE = INTERVAL + 0.3
"""Seconds for others to be heard when the peers are complete: all that are there send once in it,
so whose beacon came first decides nothing, and spares can be named."""

FRESH = SETTLE
"""Seconds since its last beacon after which a peer is waited for: it has either missed one or been
started again, with another port, and would count twice."""

FORGET = 3 * INTERVAL + 0.5
"""After so many seconds without a beacon a peer is gone; two in a row may be lost on the way."""

PATIENCE = FORGET + 0.5
"""Seconds for others to be heard when the peers are complete but for their version: enough for one
to be forgotten that was upgraded and started again."""

LOOK_AGAIN = 0.1
"""Seconds between two looks whether a peer that was waited for is gone."""


@attrs.frozen
class Found:
    """The peers of a cluster.

    ``peers`` are sorted by their text; ``conflicts`` are beacons of peers that run another
    version and so are not among them.
    """

    peers: tuple[Address, ...]
    conflicts: tuple[Beacon, ...] = ()


class Census:
    """Who has been heard of late.

    Attributes:
        ignored: How many datagrams did not count, by reason.
    """

    def __init__(self, secret: ClusterSecret, cluster: str) -> None:
        self.ignored: Counter[str] = Counter()
        self._reader = BeaconReader(secret, cluster)
        self._beacons: dict[Address, tuple[Beacon, float]] = {}  # the last of each peer, and when

    def hear(self, datagram: bytes, sender: str, unix: float, now: float) -> None:
        """Take in what came from the IP address ``sender`` at the Unix time ``unix``.

        Args:
            now: The same moment on a monotonic clock.
        """
        beacon = self._reader.read(datagram, sender, unix)
        if isinstance(beacon, Beacon):
            self._beacons[beacon.address] = beacon, now
        else:
            self.ignored[beacon] += 1

    def found(self, now: float) -> Found:
        """The peers heard within the last :data:`FORGET` seconds.

        So long one that was started again counts twice if it has another port.
        """
        late = [beacon for beacon, heard in self._beacons.values() if now - heard <= FORGET]
        beacons = sorted(late, key=lambda beacon: str(beacon.address))
        peers = tuple(beacon.address for beacon in beacons if _fits(beacon))
        return Found(peers, tuple(beacon for beacon in beacons if not _fits(beacon)))

    def fresh(self, peers: Iterable[Address], now: float) -> bool:
        """Whether all of ``peers`` were heard within the last :data:`FRESH` seconds."""
        return all(now - self._beacons[peer][1] <= FRESH for peer in peers)


def find_peers(options: ClusterOptions, say: Callable[[str], None] = lambda line: None) -> Found:
    """The peers of a coordinator: those it was told, or at least as many as it needs.

    Blocks for up to ``options.discovery_timeout`` seconds.

    Args:
        say: Takes a line for the operator when there is something to wait for.

    Raises:
        PortTaken: The port of the beacons is in use.
        DiscoveryError: Too few were heard in time.
        ClusterVersionError: Too few run this version.
    """
    if options.discovery == "static":
        return Found(tuple(sorted(options.peers, key=str)))
    assert options.secret is not None, "beacons are signed"
    census = Census(options.secret, options.name)
    with listen_for_beacons(options.discovery_port) as sock:
        wanted, port = options.places, options.discovery_port
        say(f"waiting for the beacons of {wanted} peers on UDP port {port}")
        return await_peers(sock, census, options.places, options.discovery_timeout)


def listen_for_beacons(port: int) -> socket.socket:
    """A UDP socket on all addresses of this machine.

    Raises:
        PortTaken: The port is in use, or not for this user.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        sock.bind(("", port))
    except OSError as error:
        sock.close()
        raise PortTaken(
            f"UDP port {port}",
            error.strerror or str(error),
            "Choose another with --cluster-discovery-port, on all nodes alike; or stop what uses "
            "it, maybe another coordinator.",
        ) from error
    return sock


def await_peers(
    sock: socket.socket,
    census: Census,
    wanted: int,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Hear beacons on ``sock`` until ``wanted`` peers are known, and a little longer for others.

    A peer that was heard before and is not any more is waited for until it is forgotten or
    ``timeout`` is over.

    Raises:
        DiscoveryError: ``timeout`` seconds were not enough.
        ClusterVersionError: Enough were heard, but for :data:`PATIENCE` seconds not enough that
            run this version.
    """
    deadline = clock() + timeout
    settled = hopeless = math.inf
    while True:
        now = clock()
        found = census.found(now)
        enough = len(found.peers) >= wanted
        outdated = not enough and len(found.peers) + len(found.conflicts) >= wanted
        settled = min(settled, now + SETTLE) if enough else math.inf
        hopeless = min(hopeless, now + PATIENCE) if outdated else math.inf
        if now >= settled and (now >= deadline or census.fresh(found.peers, now)):
            return found
        if outdated and now >= min(hopeless, deadline):
            raise version_error(found.conflicts)
        if not enough and now >= deadline:
            port = sock.getsockname()[1]
            raise _too_few(found, census.ignored, wanted, timeout, port)
        until = max(settled, now + LOOK_AGAIN) if enough else min(hopeless, deadline)
        sock.settimeout(until - now)
        try:
            datagram, sender = sock.recvfrom(LARGEST + 1)
        except TimeoutError:
            continue
        census.hear(datagram, sender[0], time.time(), clock())


def version_error(conflicts: tuple[Beacon, ...]) -> ClusterVersionError:
    """What to say about peers that run another version."""
    return ClusterVersionError(
        nodes=tuple(
            (str(beacon.address), f"mlxcel {beacon.version}, protocol {beacon.protocol}")
            for beacon in conflicts
        ),
        ours=f"mlxcel {__version__}, protocol {PROTOCOL_VERSION}",
    )


def _fits(beacon: Beacon) -> bool:
    return (beacon.version, beacon.protocol) == (__version__, PROTOCOL_VERSION)


_EXPLANATIONS = {
    "forged": "not signed with this secret",
    "foreign": "of another --cluster-name",
    "stale": "of another time: the clocks of the machines differ by more than a minute",
    "displaced": "sent from another address than they name, as behind NAT",
}


def _too_few(
    found: Found, ignored: Counter[str], wanted: int, timeout: float, port: int
) -> DiscoveryError:
    hints = [f"{ignored[why]} {text}" for why, text in _EXPLANATIONS.items() if ignored[why]]
    conflicts = [f"{beacon.address} runs mlxcel {beacon.version}" for beacon in found.conflicts]
    return DiscoveryError(
        wanted=wanted,
        found=tuple(map(str, found.peers)),
        seconds=timeout,
        port=port,
        hints=tuple(conflicts + ([f"ignored beacons: {', '.join(hints)}"] if hints else [])),
    )
