"""Where the ranks of a stage reach each other without the cluster's own connections."""

from __future__ import annotations

import socket

import attrs
import pytest

from mlxcel.cluster.fabric import fabric_address
from mlxcel.cluster.messages import ModelIdentity, Offer
from mlxcel.errors import ListenError

TOML = """
[[nodes]]
id = "s0-r0"
address = "localhost:19001"
role = "2d"
stage = 0
rank = 0
"""
OFFER = Offer(
    "s", "s0-r0", "f", 0, 1, 0, 4, None, False, ModelIdentity("0", (), 4), TOML, "d", "c", {}, {},
    1, "tcp", 4, 60.0, {}, collectives="ring",
)  # fmt: skip
HOSTS = ("127.0.0.1", "198.51.100.1")


def test_an_address_that_is_free() -> None:
    """It has the IP address of the node's own host, and a port that can be taken."""
    host, _, port = fabric_address(OFFER).rpartition(":")
    assert host == "127.0.0.1"
    socket.create_server((host, int(port))).close()


def test_nothing_is_needed_where_the_transport_carries_all() -> None:
    """Then no port is looked for."""
    assert fabric_address(attrs.evolve(OFFER, collectives="transport")) == ""


def test_an_address_of_another_machine() -> None:
    """A node that is reached through somebody else cannot listen there."""
    elsewhere = attrs.evolve(OFFER, topology=TOML.replace("localhost", "198.51.100.1"))
    with pytest.raises(ListenError, match=r"198\.51\.100\.1"):
        fabric_address(elsewhere)


def test_an_own_name_is_reached_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has a loopback address too, the other one is told to the ranks."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in HOSTS]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    with pytest.raises(ListenError, match="assign"):  # it is not this machine's, but was tried
        fabric_address(OFFER)
    del found[1]
    assert fabric_address(OFFER).startswith("127.0.0.1:")
