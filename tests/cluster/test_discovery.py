"""Finding peers: by list, and by their beacons over real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest

from mlxcel import __version__
from mlxcel.cluster.addresses import Address
from mlxcel.cluster.announce import Announcement, announce, send_beacon
from mlxcel.cluster.beacon import Beacon, make_beacon
from mlxcel.cluster.discovery import Census, await_peers, find_peers, listen_for_beacons
from mlxcel.cluster.introduction import PROTOCOL_VERSION
from mlxcel.cluster.options import ClusterOptions
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.errors import ClusterVersionError, DiscoveryError, PortTaken

SECRET = ClusterSecret(b"a secret of the cluster")
SECONDS = 60.0


@pytest.fixture(autouse=True)
def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for but those that have sent already."""
    monkeypatch.setattr("mlxcel.cluster.discovery.SETTLE", 0.05)


def beacon(port: int, version: str = __version__, protocol: int = PROTOCOL_VERSION) -> Beacon:
    return Beacon("demo", Address("127.0.0.1", port), version, protocol)


def signed(beacon: Beacon, secret: ClusterSecret = SECRET, age: float = 0) -> bytes:
    return make_beacon(beacon, secret, time.time() - age, os.urandom(16))


@contextmanager
def listening() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A coordinator's socket on a free port, and one that sends to it."""
    with (
        listen_for_beacons(0) as sock,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        sender.connect(("127.0.0.1", sock.getsockname()[1]))
        yield sock, sender


def awaited(
    census: Census, moments: list[float], *sent: Beacon, timeout: float = SECONDS
) -> list[int]:
    """The ports of two peers that are found by what is ``sent``.

    ``moments`` are when the wait begins, and then all looks and arrivals.
    """
    clock = iter(moments)
    with listening() as (sock, sender):
        for each in sent:
            sender.send(signed(each))
        found = await_peers(sock, census, 2, timeout, clock=lambda: next(clock))
    return [peer.port for peer in found.peers]


def test_listed_peers() -> None:
    """A list is found as it is, in the order of its text, without a secret."""
    peers = (Address("10.0.0.2", 1), Address("10.0.0.10", 1))
    options = ClusterOptions("coordinator-auto", stages=2, peers=peers)
    assert find_peers(options).peers == peers[::-1]


def test_peers_are_found_by_their_beacons() -> None:
    """Each counts once however often it sends; they come sorted."""
    with listening() as (sock, sender):
        for port in (7002, 7001, 7001, 7003):
            sender.send(signed(beacon(port)))
        found = await_peers(sock, Census(SECRET, "demo"), 3, SECONDS)
    assert [peer.port for peer in found.peers] == [7001, 7002, 7003]
    assert found.conflicts == ()


def test_of_too_many_the_first_are_not_those_that_were_heard_first() -> None:
    """All that are there are found, so that who gets a stage and who is a spare does not change."""
    with listening() as (sock, sender):
        for port in (7003, 7002, 7001):
            sender.send(signed(beacon(port)))
        found = await_peers(sock, Census(SECRET, "demo"), 2, SECONDS)
    assert [peer.port for peer in found.peers] == [7001, 7002, 7003]


def test_a_peer_that_was_started_again_counts_once() -> None:
    """Whoever has not been heard for some seconds is gone, and is not dialled."""
    census = Census(SECRET, "demo")
    census.hear(signed(beacon(7001)), "127.0.0.1", time.time(), 0.0)
    assert [peer.port for peer in census.found(0.5).peers] == [7001]
    census.hear(signed(beacon(7002)), "127.0.0.1", time.time(), 55.0)
    assert [peer.port for peer in census.found(55.0).peers] == [7002]


def test_a_peer_that_goes_while_others_are_waited_for() -> None:
    """Enough are found only if all of them are still there at the end."""
    census = Census(SECRET, "demo")
    census.hear(signed(beacon(7001)), "127.0.0.1", time.time(), 0.0)
    moments = [0.0, 3.4, 3.4, 3.45, 3.48, 3.55, 3.6, 3.6, 3.7]
    assert awaited(census, moments, beacon(7002), beacon(7002), beacon(7003)) == [7002, 7003]


def test_a_peer_that_was_started_again_a_moment_ago_does_not_count_twice() -> None:
    """While it is not sure that both of its ports are alive, it is waited for."""
    census = Census(SECRET, "demo")
    census.hear(signed(beacon(7001)), "127.0.0.1", time.time(), 0.0)
    moments = [0.0, 0.9, 1.0, 1.0, 2.4, 2.4, 3.6, 3.6]
    assert awaited(census, moments, beacon(7002), beacon(7002), beacon(7003)) == [7002, 7003]


def test_a_peer_that_is_not_heard_is_waited_for_no_longer_than_for_others() -> None:
    """When the time is over, those are taken that there are: all of them may be alive."""
    census = Census(SECRET, "demo")
    census.hear(signed(beacon(7001)), "127.0.0.1", time.time(), 0.0)
    moments = [0.0, 1.9, 2.0, 2.0, 2.1, 2.6]
    assert awaited(census, moments, beacon(7002), timeout=2.5) == [7001, 7002]


def test_a_peer_that_was_upgraded_and_started_again_is_no_conflict() -> None:
    """What it was before is forgotten before anybody is told of another version."""
    census = Census(SECRET, "demo")
    census.hear(signed(beacon(7001, "0.0.1")), "127.0.0.1", time.time(), 0.0)
    moments = [0.0, 0.1, 0.1, 0.1, 3.4, 3.4, 3.6, 3.6, 3.7]
    assert awaited(census, moments, beacon(7002), beacon(7002), beacon(7003)) == [7002, 7003]


def test_two_beacons_in_a_row_may_be_lost() -> None:
    """The third one comes in time, with some delay."""
    census = Census(SECRET, "demo")
    census.hear(signed(beacon(7001)), "127.0.0.1", time.time(), 0.0)
    assert [peer.port for peer in census.found(3.3).peers] == [7001]


def test_the_operator_is_told_what_is_waited_for() -> None:
    """A coordinator that hears nothing says on which port, before it gives up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    options = ClusterOptions(
        "coordinator-auto",
        stages=3,
        secret=SECRET,
        discovery="mdns",
        discovery_port=port,
        discovery_timeout=0.01,
    )
    said: list[str] = []
    with pytest.raises(DiscoveryError):
        find_peers(options, said.append)
    assert said == [f"waiting for the beacons of 3 peers on UDP port {port}"]


def test_everything_else_is_ignored_and_counted() -> None:
    """Junk, forgeries, copies, beacons of other clusters, times and places find nobody."""
    census = Census(SECRET, "demo")
    good = signed(beacon(7001))
    moved = attrs.evolve(beacon(7002), address=Address("10.9.9.9", 7002))
    foreign = attrs.evolve(beacon(7003), cluster="other")
    with listening() as (sock, sender):
        for datagram in (
            b"junk",
            b"x" * 2000,
            signed(beacon(7004), ClusterSecret(b"another secret of 16")),
            signed(foreign),
            signed(moved),
            signed(beacon(7005), age=600),
            good,
            good,
            signed(beacon(7006)),
        ):
            sender.send(datagram)
        found = await_peers(sock, census, 2, SECONDS)
    assert [peer.port for peer in found.peers] == [7001, 7006]
    assert census.ignored == {
        "malformed": 2,
        "forged": 1,
        "foreign": 1,
        "displaced": 1,
        "stale": 1,
        "replayed": 1,
    }


def test_a_flood_of_junk_does_not_keep_peers_out() -> None:
    """Peers that send beacon after beacon are found amid 10,000 other datagrams."""
    census = Census(SECRET, "demo")
    forged = signed(beacon(7009), ClusterSecret(b"another secret of 16"))
    sent = 0

    def flood(sender: socket.socket) -> None:
        nonlocal sent
        for sent in range(1, 10_001):
            sender.send(forged if sent % 2 else os.urandom(200))
        while not done.is_set():
            sender.send(signed(beacon(7001)))
            sender.send(signed(beacon(7002)))

    done = threading.Event()
    with listening() as (sock, sender):
        thread = threading.Thread(target=flood, args=(sender,))
        thread.start()
        try:
            found = await_peers(sock, census, 2, SECONDS)
        finally:
            done.set()
            thread.join()
    assert sent == 10_000
    assert [peer.port for peer in found.peers] == [7001, 7002]
    assert census.ignored["forged"] + census.ignored["malformed"] > 0


def test_too_few_in_time() -> None:
    """The error counts and names who was found, says what else was heard, and what helps."""
    census = Census(SECRET, "demo")
    ticks = iter([0.0] * 7 + [2.0])  # the last beacon comes, then time is up
    with listening() as (sock, sender):
        sender.send(signed(beacon(7001)))
        sender.send(signed(beacon(7002), age=600))
        sender.send(signed(beacon(7003, version="0.0.1")))
        with pytest.raises(DiscoveryError) as caught:
            await_peers(sock, census, 3, 2.0, clock=lambda: next(ticks))
        port = sock.getsockname()[1]
    text = str(caught.value)
    assert text.startswith(
        f"1 of 3 peers (127.0.0.1:7001) announced themselves on UDP port {port} within 2 s. "
        f"127.0.0.1:7003 runs mlxcel 0.0.1; ignored beacons: 1 of another time"
    )
    for way_out in ("--cluster-discovery-target", "--cluster-peers", "subnet", "firewall"):
        assert way_out in text
    assert caught.value.exit_code == 1


def test_nobody_in_time() -> None:
    """Silence ends with the same error."""
    with listening() as (sock, _), pytest.raises(DiscoveryError, match="0 of 1 peers announced"):
        await_peers(sock, Census(SECRET, "demo"), 1, 0.01)


@pytest.mark.parametrize(
    ("version", "protocol"), [("0.0.1", PROTOCOL_VERSION), (__version__, PROTOCOL_VERSION + 1)]
)
def test_another_version_ends_the_wait(
    version: str, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the peers are complete but for their version, both versions are said soon."""
    monkeypatch.setattr("mlxcel.cluster.discovery.PATIENCE", 0.0)
    with listening() as (sock, sender):
        sender.send(signed(beacon(7001)))
        sender.send(signed(beacon(7002, version, protocol)))
        with pytest.raises(ClusterVersionError) as caught:
            await_peers(sock, Census(SECRET, "demo"), 2, SECONDS)
    text = str(caught.value)
    assert f"127.0.0.1:7002 runs mlxcel {version}, protocol {protocol}" in text
    assert f"mlxcel {__version__}, protocol {PROTOCOL_VERSION}" in text
    assert "upgraded together" in text


def test_an_upgraded_peer_is_welcome() -> None:
    """The last beacon of a peer counts, so one that comes back with this version is found."""
    with listening() as (sock, sender):
        sender.send(signed(beacon(7001, "0.0.1")))
        sender.send(signed(beacon(7001)))
        sender.send(signed(beacon(7002, "0.0.1")))
        sender.send(signed(beacon(7003)))
        found = await_peers(sock, Census(SECRET, "demo"), 2, SECONDS)
    assert [peer.port for peer in found.peers] == [7001, 7003]
    assert [conflict.address.port for conflict in found.conflicts] == [7002]


def test_a_port_in_use() -> None:
    """A second coordinator on one machine is told which flag helps."""
    with listen_for_beacons(0) as sock:
        port = sock.getsockname()[1]
        options = ClusterOptions(
            "coordinator-auto", stages=2, secret=SECRET, discovery="mdns", discovery_port=port
        )
        with pytest.raises(PortTaken, match="--cluster-discovery-port") as caught:
            find_peers(options)
    assert f"UDP port {port}" in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
@pytest.mark.parametrize("target", ["127.255.255.255", "127.0.0.1"])
def test_peers_announce_themselves(host: str, target: str) -> None:
    """A beacon names the address that it leaves from; target may be one host or a subnet."""
    with listen_for_beacons(0) as sock:
        port = sock.getsockname()[1]
        for number in (7001, 7002):
            send_beacon(Announcement(SECRET, "demo", Address(host, number), target, port))
        found = await_peers(sock, Census(SECRET, "demo"), 2, SECONDS)
    assert list(map(str, found.peers)) == ["127.0.0.1:7001", "127.0.0.1:7002"]


def test_peers_go_on_announcing_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beacons come until the peer is taken, and a network that is not there yet is no end."""
    monkeypatch.setattr("mlxcel.cluster.announce.INTERVAL", 0)
    sent: list[Announcement] = []

    def send(announcement: Announcement) -> None:
        sent.append(announcement)
        if len(sent) == 1:
            raise OSError("the network is unreachable")
        if len(sent) == 3:
            loop.call_soon_threadsafe(task.cancel)

    monkeypatch.setattr("mlxcel.cluster.announce.send_beacon", send)
    said = Announcement(SECRET, "demo", Address("0.0.0.0", 7001), "127.0.0.1", 1)

    async def main() -> None:
        nonlocal loop, task
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(announce(said))
        await asyncio.wait([task], timeout=SECONDS)

    loop: asyncio.AbstractEventLoop
    task: asyncio.Task[None]
    asyncio.run(main())
    assert task.cancelled()
    assert sent[:3] == [said] * 3
