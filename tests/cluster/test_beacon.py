"""Beacons: what counts, and why everything else does not."""

from __future__ import annotations

import hashlib
import hmac
import struct

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.beacon import LARGEST, REMEMBERED, WINDOW, Beacon, BeaconReader, make_beacon
from mlxcel.cluster.secret import ClusterSecret

SECRET = ClusterSecret(b"a secret of the cluster")
NOW = 1_800_000_000.0
NONCE = bytes(range(16))
BEACON = Beacon("demo", Address("10.0.0.5", 19001), "0.1.0", 5)
DATAGRAM = make_beacon(BEACON, SECRET, NOW, NONCE)


def reader() -> BeaconReader:
    return BeaconReader(SECRET, "demo")


def read(datagram: bytes, sender: str = "10.0.0.5", now: float = NOW) -> object:
    return reader().read(datagram, sender, now)


def test_a_beacon_is_read_as_it_was_made() -> None:
    """Cluster, address and versions arrive."""
    assert read(DATAGRAM) == BEACON


def test_a_second_implementation_makes_the_same_bytes() -> None:
    """The layout is the documented one, put together here by hand."""
    said = b"MLXB" + struct.pack("<BIQ", 1, 5, 1_800_000_000 // 60) + NONCE
    said += struct.pack("<HBBB", 19001, 4, 8, 5) + b"demo" + b"10.0.0.5" + b"0.1.0"
    proof = hmac.new(SECRET.value, b"mlxcel beacon 1\0" + said, hashlib.sha256).digest()
    assert said + proof == DATAGRAM


def test_the_label_is_not_the_handshakes() -> None:
    """A proof of the handshake over the same bytes is none for a beacon."""
    for label in (b"mlxcel 5 dialer\0", b"mlxcel 5 acceptor\0", b""):
        said = DATAGRAM[:-32]
        proof = hmac.new(SECRET.value, label + said, hashlib.sha256).digest()
        assert read(said + proof) == "forged"


@pytest.mark.parametrize("position", range(len(DATAGRAM)))
def test_no_byte_can_be_changed(position: int) -> None:
    """Whichever byte is another, the beacon does not count."""
    changed = bytearray(DATAGRAM)
    changed[position] ^= 1
    assert read(bytes(changed)) in ("malformed", "foreign", "forged")


@pytest.mark.parametrize(
    "datagram", [b"", b"MLXB", DATAGRAM[:-1], DATAGRAM + b"\0", b"MLXB" * 200, b"\0" * LARGEST]
)
def test_what_is_no_beacon(datagram: bytes) -> None:
    """Other lengths and other beginnings are told apart before any cryptography."""
    assert read(datagram) == "malformed"


@given(st.binary(max_size=LARGEST + 10))
def test_any_bytes_are_ignored(datagram: bytes) -> None:
    """Nothing that is not signed counts, and nothing raises."""
    assert read(datagram) in ("malformed", "foreign", "forged")
    assert read(DATAGRAM[:4] + datagram) in ("malformed", "foreign", "forged")


def test_other_clusters_are_foreign() -> None:
    """A beacon with another name does not count, though the secret is the same."""
    other = Beacon("other", BEACON.address, "0.1.0", 5)
    assert read(make_beacon(other, SECRET, NOW, NONCE)) == "foreign"


def test_other_secrets_are_forgeries() -> None:
    """The right name alone proves nothing."""
    assert read(make_beacon(BEACON, ClusterSecret(b"x" * 16), NOW, NONCE)) == "forged"


def test_other_versions_are_read() -> None:
    """A peer of another version is heard, so that somebody can say so."""
    other = Beacon("demo", BEACON.address, "9.9.9", 6)
    assert read(make_beacon(other, SECRET, NOW, NONCE)) == other


@pytest.mark.parametrize(
    ("windows", "counts"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)]
)
def test_only_beacons_of_this_time_count(windows: int, counts: bool) -> None:
    """The window before and the one after are near enough, as clocks differ."""
    made = make_beacon(BEACON, SECRET, NOW + windows * WINDOW, NONCE)
    assert read(made) == (BEACON if counts else "stale")


def test_a_copy_does_not_count() -> None:
    """The same beacon counts once, another of the same peer counts."""
    hearing = reader()
    assert hearing.read(DATAGRAM, "10.0.0.5", NOW) == BEACON
    assert hearing.read(DATAGRAM, "10.0.0.5", NOW + 1) == "replayed"
    fresh = make_beacon(BEACON, SECRET, NOW, bytes(16))
    assert hearing.read(fresh, "10.0.0.5", NOW + 1) == BEACON


def test_a_copy_from_elsewhere_does_not_count() -> None:
    """Who sends on what another peer signed does not become that peer."""
    assert read(DATAGRAM, sender="10.0.0.66") == "displaced"


def test_what_was_heard_is_remembered_within_bounds() -> None:
    """However many beacons come, memory holds so many; the oldest are forgotten first."""
    hearing = reader()
    for number in range(REMEMBERED + 10):
        nonce = number.to_bytes(16, "little")
        hearing.read(make_beacon(BEACON, SECRET, NOW, nonce), "10.0.0.5", NOW)
    assert len(hearing._seen) == REMEMBERED
    last = make_beacon(BEACON, SECRET, NOW, nonce)
    assert hearing.read(last, "10.0.0.5", NOW) == "replayed"


def test_a_signed_beacon_with_a_nonsense_address_is_ignored() -> None:
    """Even what the secret signed is checked."""
    strange = Beacon("demo", Address("no such host!", 1), "0.1.0", 5)
    assert read(make_beacon(strange, SECRET, NOW, NONCE)) == "malformed"


def test_a_version_cannot_play_with_the_terminal() -> None:
    """Control characters are read as escapes."""
    datagram = make_beacon(attrs.evolve(BEACON, version="\x1b[2J"), SECRET, NOW, NONCE)
    assert read(datagram) == attrs.evolve(BEACON, version="\\x1b[2J")
