"""What a dry run finds out, and that it leaves nothing behind but the file."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from mlxcel import __version__
from mlxcel.cluster.addresses import Address
from mlxcel.cluster.announce import Announcement, send_beacon
from mlxcel.cluster.beacon import Beacon, make_beacon
from mlxcel.cluster.dry_run import dry_run
from mlxcel.cluster.handshake import Acceptor
from mlxcel.cluster.introduction import PROTOCOL_VERSION
from mlxcel.cluster.options import ClusterOptions
from mlxcel.cluster.port_probe import port_state
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.errors import (
    AddressError,
    ClusterVersionError,
    ListenError,
    MlxcelError,
    PortTaken,
    TopologyError,
)

SECRET = ClusterSecret(b"a secret of the cluster")
HELLO = Acceptor(SECRET).hello
REMOTE = (Address("198.51.100.11", 19001), Address("198.51.100.12", 19001))


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def speaking(words: bytes) -> Iterator[Address]:
    """Something that listens on a free port, says ``words`` to all, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with closing(server.accept()[0]) as sock:
                        sock.sendall(words)

        thread = threading.Thread(target=greet)
        thread.start()
        yield Address(*server.getsockname())
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def options(tmp_path: Path) -> ClusterOptions:
    return ClusterOptions(
        "coordinator-auto",
        stages=2,
        peers=REMOTE,
        control=Address("127.0.0.1", free_port()),
        config_out=tmp_path / "out" / "cluster.toml",
        dry_run=True,
    )


HTTP = Address("127.0.0.1", 0)


def nothing_written(options: ClusterOptions) -> bool:
    return not options.config_path("coordinator").exists()


def test_spares_are_named(options: ClusterOptions) -> None:
    """Of more peers than stages the first take part, whatever order they are listed in."""
    spare = Address("198.51.100.9", 19001)  # as text it comes after .11 and .12
    result = dry_run(attrs.evolve(options, peers=(spare, *REMOTE)), HTTP)
    assert [node.address for node in result.topology.stages] == list(REMOTE)
    assert result.notices == (f"not used, a spare: {spare}",)
    assert result.path.read_text().startswith("# The nodes of a cluster")


def test_the_same_file_again(options: ClusterOptions) -> None:
    """A second run, peers in another order, writes the same bytes."""
    first = dry_run(options, HTTP).path.read_bytes()
    assert dry_run(attrs.evolve(options, peers=REMOTE[::-1]), HTTP).path.read_bytes() == first


@pytest.mark.parametrize("which", ["http", "control"])
def test_the_coordinators_own_ports(options: ClusterOptions, which: str) -> None:
    """A port that another program has is named with the flag that chooses another."""
    with speaking(HELLO) as taken:
        http = taken if which == "http" else HTTP
        control = taken if which == "control" else options.control
        expected: type[MlxcelError] = AddressError if which == "http" else ListenError
        with pytest.raises(expected) as caught:
            dry_run(attrs.evolve(options, control=control), http)
    assert str(taken.port) in str(caught.value)
    assert ("--port" if which == "http" else "--cluster-control-addr") in str(caught.value)
    assert caught.value.exit_code == 1
    assert nothing_written(options)


def test_peers_that_wait_already(options: ClusterOptions) -> None:
    """A port that a peer has is as it should be; one that nobody has yet is only noticed."""
    later = Address("127.0.0.1", free_port())
    with speaking(HELLO) as peer:
        result = dry_run(attrs.evolve(options, peers=(peer, later)), HTTP)
    assert result.notices == (f"no peer listens on {later} yet",)


@pytest.mark.parametrize(
    "words",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, HELLO[:-1]],
    ids=["hung up", "http", "half a hello"],
)
def test_a_planned_port_that_another_program_has(options: ClusterOptions, words: bytes) -> None:
    """Who does not say a peer's hello keeps the peer from listening there."""
    free = Address("127.0.0.1", free_port())
    with speaking(words) as taken, pytest.raises(PortTaken) as caught:
        dry_run(attrs.evolve(options, peers=(taken, free)), HTTP)
    assert f"{taken}, where stage-" in str(caught.value)
    assert "no mlxcel peer answers there" in str(caught.value)
    assert nothing_written(options)


def test_a_program_that_says_nothing(
    options: ClusterOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence ends; whoever is silent is no peer."""
    monkeypatch.setattr("mlxcel.cluster.port_probe.HELLO_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        state = port_state(Address(*server.getsockname()))
    assert isinstance(state, OSError)


def test_a_peer_of_another_protocol(options: ClusterOptions) -> None:
    """Its hello tells the version, and both are said."""
    hello = HELLO[:4] + struct.pack("<I", PROTOCOL_VERSION + 1) + HELLO[8:]
    with speaking(hello) as peer, pytest.raises(ClusterVersionError) as caught:
        dry_run(attrs.evolve(options, peers=(peer, Address("127.0.0.1", free_port()))), HTTP)
    assert f"{peer} runs protocol {PROTOCOL_VERSION + 1}" in str(caught.value)
    assert f"here it is protocol {PROTOCOL_VERSION}." in str(caught.value)
    assert nothing_written(options)


def test_other_machines_are_never_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses that are not this host's, and names that are unknown, are left alone."""

    def dial(*_: Any) -> None:
        raise AssertionError("it was dialled")

    monkeypatch.setattr(socket, "create_connection", dial)
    assert port_state(REMOTE[0]) == "elsewhere"
    assert port_state(Address("no-such-host.invalid", 1)) == "elsewhere"


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        (("198.51.100.1", "0.0.0.0"), "--cluster-control-addr"),
        (("198.51.100.1", "127.0.0.1"), "--cluster-control-addr"),
    ],
)
def test_peers_that_cannot_reach_each_other(
    options: ClusterOptions, peers: tuple[str, str], words: str
) -> None:
    """A stage dials the next one, so none may have an address that only it understands."""
    listed = tuple(Address(host, 19001) for host in peers)
    with pytest.raises(TopologyError, match=words) as caught:
        dry_run(attrs.evolve(options, peers=listed), HTTP)
    assert str(caught.value).startswith("--cluster-peers: ")
    assert nothing_written(options)


def test_a_peer_at_the_coordinators_address(options: ClusterOptions) -> None:
    """One address is one node's."""
    assert options.control is not None
    peers = (options.control, Address("127.0.0.1", free_port()))
    with pytest.raises(TopologyError, match="'coordinator' and 'stage-"):
        dry_run(attrs.evolve(options, peers=peers), HTTP)


@pytest.fixture
def hearing(options: ClusterOptions, monkeypatch: pytest.MonkeyPatch) -> ClusterOptions:
    monkeypatch.setattr("mlxcel.cluster.discovery.SETTLE", 0.1)
    port = free_port(socket.SOCK_DGRAM)
    return attrs.evolve(
        options, name="demo", peers=(), discovery="mdns", discovery_port=port, secret=SECRET
    )


@contextmanager
def beacons(*datagrams: Any) -> Iterator[None]:
    """Calls what it is given, over and over, as peers do."""
    done = threading.Event()

    def send() -> None:
        while not done.wait(0.01):
            for datagram in datagrams:
                with contextlib.suppress(ConnectionRefusedError):  # nobody listens yet
                    datagram()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_peers_that_announce_themselves(hearing: ClusterOptions) -> None:
    """Beacons alone make the plan."""
    ports = sorted((free_port(), free_port()), key=str)
    announcements = [
        Announcement(SECRET, "demo", Address("0.0.0.0", p), "127.0.0.1", hearing.discovery_port)
        for p in ports
    ]
    with beacons(*(lambda said=said: send_beacon(said) for said in announcements)):
        result = dry_run(hearing, HTTP)
    assert [node.address.port for node in result.topology.stages] == ports


def test_a_version_conflict_in_beacons(hearing: ClusterOptions) -> None:
    """Even where enough peers fit, one of another version ends the dry run."""

    def send(port: int, version: str) -> None:
        beacon = Beacon("demo", Address("127.0.0.1", port), version, PROTOCOL_VERSION)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            datagram = make_beacon(beacon, SECRET, time.time(), os.urandom(16))
            sock.sendto(datagram, ("127.0.0.1", hearing.discovery_port))

    peers = ((7000, "0.0.1"), (7001, __version__), (7002, __version__))
    with (
        beacons(*(lambda peer=peer: send(*peer) for peer in peers)),
        pytest.raises(ClusterVersionError, match=r"127\.0\.0\.1:7000 runs mlxcel 0\.0\.1"),
    ):
        dry_run(hearing, HTTP)
    assert nothing_written(hearing)
