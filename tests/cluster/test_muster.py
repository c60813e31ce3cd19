"""Connecting to all peers, with a dial that does as the test says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.muster import muster
from mlxcel.cluster.session import Session
from mlxcel.errors import BringUpError, DeadlineError, PeerRefused, SecretMismatch, Unreachable
from mlxcel.transport import Keys

PEERS = [(f"stage-{n}", Address(f"10.0.0.{n + 1}", 19001)) for n in range(3)]
PEER = Introduction("", "peer", "c", {}, {}, ())
Answer = Session | Exception


def session() -> Session:
    return Session(socket.socket(), Keys(b"", b""), PEER, "10.0.0.1:1")


def unreachable(address: Address) -> Unreachable:
    return Unreachable(str(address), "nothing listens there.", "Start it.")


class Phone:
    """Answers each address's calls one after the other; the last answer stays."""

    def __init__(self, *answers: list[Answer]) -> None:
        self.calls = {address: 0 for _, address in PEERS}
        self._answers = {a: said for (_, a), said in zip(PEERS, answers, strict=True)}

    async def dial(self, address: Address) -> Session:
        said = self._answers[address]
        answer = said[min(self.calls[address], len(said) - 1)]
        self.calls[address] += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


def call_all(
    phone: Phone, patience: float, on_waiting: Callable[[Address], None] = lambda address: None
) -> list[Session]:
    return asyncio.run(muster(PEERS, phone.dial, patience=patience, on_waiting=on_waiting))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxcel.cluster.muster.RETRY_SECONDS", 0.001)


def test_all_are_there() -> None:
    """The connections come in the order of the peers, each made once."""
    sessions = [session() for _ in PEERS]
    phone = Phone(*([found] for found in sessions))
    assert call_all(phone, patience=0.0) == sessions
    assert set(phone.calls.values()) == {1}


def test_late_ones_are_waited_for() -> None:
    """Where nothing listens yet it is tried again, and said once."""
    late = PEERS[1][1]
    phone = Phone([session()], [unreachable(late), unreachable(late), session()], [session()])
    waited: list[Address] = []
    assert len(call_all(phone, 60.0, waited.append)) == 3
    assert waited == [late]
    assert phone.calls[late] == 3


def test_patience_ends() -> None:
    """Whoever does not come in time is named, and the connections to the others are closed."""
    kept = session()
    phone = Phone([kept], [unreachable(PEERS[1][1])], [unreachable(PEERS[2][1])])
    with pytest.raises(BringUpError) as caught:
        call_all(phone, patience=0.02)
    assert [(f.node, f.reason) for f in caught.value.failures] == [
        ("stage-1", "unreachable"),
        ("stage-2", "unreachable"),
    ]
    assert kept.sock.fileno() == -1


def test_nobody_is_waited_for_in_vain() -> None:
    """When one can never be had, there is no use in waiting for another."""
    wrong = SecretMismatch(str(PEERS[2][1]), "its secret is another one.", "Copy the file.")
    slow = DeadlineError(str(PEERS[1][1]), "the handshake", 1.0, "It hangs.")
    phone = Phone([unreachable(PEERS[0][1])], [slow], [wrong])
    with pytest.raises(BringUpError) as caught:
        call_all(phone, patience=1e6)
    assert [failure.reason for failure in caught.value.failures] == [
        "unreachable",
        "silent",
        "secret",
    ]


def test_a_bug_is_no_peers_fault() -> None:
    """What nobody foresaw is raised as it is."""
    phone = Phone([session()], [ZeroDivisionError("a bug")], [session()])
    with pytest.raises(ZeroDivisionError):
        call_all(phone, patience=0.0)


def test_a_peer_of_another_coordinator_ends_it_at_once() -> None:
    """Where the first peer is taken, no other one is, so that the other coordinator gets all."""
    refused = PeerRefused("10.0.0.1:19001", "it refuses: busy.", "")
    phone = Phone([refused], [session()], [session()])
    with pytest.raises(BringUpError) as caught:
        call_all(phone, 5.0)
    assert [failure.node for failure in caught.value.failures] == ["stage-0"]
    assert list(phone.calls.values()) == [1, 0, 0]
