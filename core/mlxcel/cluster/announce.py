"""A peer's side of discovery: a beacon every second."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable

import attrs

from mlxcel import __version__
from mlxcel.cluster.addresses import Address
from mlxcel.cluster.beacon import NONCE, Beacon, make_beacon
from mlxcel.cluster.introduction import PROTOCOL_VERSION
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.observe.limited_log import LimitedLog

INTERVAL = 1.0
"""Seconds between two beacons."""

_log = LimitedLog(logging.getLogger(__name__), interval=60.0)


@attrs.frozen
class Announcement:
    """What a peer's beacons say, and where they go.

    Attributes:
        secret, cluster: What signs them, and the cluster's name.
        listening: Where the peer listens. An unspecified host stands for whichever address of
            this machine the beacon leaves from; the port is the real one.
        target, port: The host, maybe of a whole subnet, and the UDP port.
    """

    secret: ClusterSecret
    cluster: str
    listening: Address
    target: str
    port: int


async def announce(announcement: Announcement, wanted: Callable[[], bool] = lambda: True) -> None:
    """Send beacons until cancelled; what keeps them from leaving is logged, now and then.

    Args:
        wanted: Asked before each; a peer that has a coordinator needs none.
    """
    while True:
        try:
            if wanted():
                await asyncio.to_thread(send_beacon, announcement)
        except OSError as error:
            _log.warning(
                "unsent",
                f"no beacon could be sent to {announcement.target} "
                f"({error.strerror or error}); --cluster-discovery-target says where they go",
            )
        await asyncio.sleep(INTERVAL)


def send_beacon(announcement: Announcement) -> None:
    """Send one beacon, from the address that it names.

    Raises:
        OSError: There is no way to the target.
    """
    listening = announcement.listening
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        if not listening.is_unspecified:
            sock.bind((listening.host, 0))
        sock.connect((announcement.target, announcement.port))
        address = Address(sock.getsockname()[0], listening.port)
        beacon = Beacon(announcement.cluster, address, __version__, PROTOCOL_VERSION)
        sock.send(make_beacon(beacon, announcement.secret, time.time(), os.urandom(NONCE)))
