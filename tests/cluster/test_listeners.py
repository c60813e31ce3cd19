"""Listening at a name: all that it stands for, and what an operator should hear of it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.listeners import Found, doubtful, open_listeners

Entry = tuple[object, ...]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def entry(host: str, port: int = 0) -> Entry:
    """One of what getaddrinfo finds."""
    if ":" in host:
        return (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (host, port, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))


def places(stack: ExitStack, found: Found) -> list[tuple[str, int]]:
    listeners = [stack.enter_context(listener) for listener in open_listeners(found)]
    assert not any(listener.getblocking() for listener in listeners)
    return [listener.getsockname()[:2] for listener in listeners]


def test_a_name_is_listened_at_everywhere(stack: ExitStack) -> None:
    """All its addresses, each once, on one port, whoever is tried first by those who dial."""
    found = [entry("127.0.0.1"), entry("127.0.0.2"), entry("127.0.0.1")]
    try:
        socket.create_server(("127.0.0.2", 0)).close()
    except OSError:
        pytest.skip("this machine has one loopback address")
    (one, port), (two, same) = places(stack, found)
    assert (one, two, port) == ("127.0.0.1", "127.0.0.2", same)
    for host in (one, two):
        socket.create_connection((host, port), 10).close()


def test_an_address_that_is_not_here_is_left_out(stack: ExitStack) -> None:
    """A name may have one that this machine lacks; one that has no other is an error."""
    assert [host for host, _ in places(stack, [entry("198.51.100.1"), entry("127.0.0.1")])] == [
        "127.0.0.1"
    ]
    with pytest.raises(OSError, match=r"(?i)assign"):
        open_listeners([entry("198.51.100.1")])


def test_a_port_in_use_is_an_error(stack: ExitStack) -> None:
    """Also if only one of the addresses has it in use, and then none is listened at."""
    taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = taken.getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        open_listeners([entry("127.0.0.2", port), entry("127.0.0.1", port)])
    taken.close()
    places(stack, [entry("127.0.0.1", port)])


def test_a_chosen_port_that_is_in_use_elsewhere_is_chosen_anew(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where any port will do, it is no error that another program has one at the second address."""
    make, made = socket.create_server, []

    def chosen(address: tuple[str, int], **options: Any) -> socket.socket:
        made.append(address)
        if len(made) in busy:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        return make(("127.0.0.1", 0), **options)

    monkeypatch.setattr(socket, "create_server", chosen)
    busy = {2}
    assert len(places(stack, [entry("127.0.0.1"), entry("127.0.0.2")])) == 2
    assert [(host, bool(port)) for host, port in made] == [
        ("127.0.0.1", False),
        ("127.0.0.2", True),
    ] * 2
    made.clear()
    busy = set(range(2, 100, 2))
    with pytest.raises(OSError, match="in use"):
        open_listeners([entry("127.0.0.1"), entry("127.0.0.2")])
    assert len(made) == 10


@pytest.mark.parametrize(
    ("name", "doubted"), [("myself", True), ("localhost", False), ("127.0.0.1", False)]
)
def test_an_own_name_that_leads_others_nowhere(stack: ExitStack, name: str, doubted: bool) -> None:
    """Debian gives a machine's own name a loopback address; the operator hears which."""
    [listener] = open_listeners([entry("127.0.0.1")])
    stack.enter_context(listener)
    told = doubtful(Address(name, 0), [listener])
    assert (told is not None) == doubted
    if told is not None:
        port = listener.getsockname()[1]
        assert told.startswith(f"on this machine 'myself' is 127.0.0.1:{port} only")


def test_an_address_of_the_network_is_not_doubted(stack: ExitStack) -> None:
    """One that others reach is enough."""
    listener = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
    assert doubtful(Address("myself", 0), [listener]) is None
