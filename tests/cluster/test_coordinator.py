"""The control plane over real connections, with peers that answer as the test says."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.coordinator import Coordinator
from mlxcel.cluster.handshake import TooMuchToSay
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.messages import (
    Activate,
    Commit,
    Offer,
    Ping,
    Pong,
    Refused,
    Release,
    Reported,
    ToCoordinator,
    ToPeer,
)
from mlxcel.cluster.resources import free_memory
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.errors import BringUpError, PeerLost
from mlxcel.pipeline.report import Loading, Report

SECRET = ClusterSecret(b"a secret of the tests")
OURS = Introduction("coordinator", "coordinator", "c", {}, {}, ())
WAIT = 20.0
ENDLESS = 1000.0
"""A grace that no test waits for."""


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with Coordinator(SECRET, OURS, grace=ENDLESS) as coordinator:
        yield coordinator


def connect(coordinator: Coordinator, peers: Any) -> None:
    coordinator.connect(peers.nodes, WAIT)


def named(*addresses: Address) -> list[tuple[str, Address]]:
    return [(f"stage-{stage}", address) for stage, address in enumerate(addresses)]


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, Report]] = []
        self.losses: list[tuple[int, PeerLost]] = []
        self.changed = threading.Condition()

    def report(self, stage: int, report: Report) -> None:
        with self.changed:
            self.reports.append((stage, report))
            self.changed.notify_all()

    def lost(self, stage: int, error: PeerLost) -> None:
        with self.changed:
            self.losses.append((stage, error))
            self.changed.notify_all()

    def tick(self, now: float) -> None:
        pass

    def wait_for(self, wanted: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(wanted, WAIT), (self.reports, self.losses)


def test_introductions_come_in_the_order_of_the_stages(
    scripted_peers: Any, coordinator: Coordinator
) -> None:
    """What each peer says of itself is returned, stage by stage."""
    peers = scripted_peers(3)
    peers[1].introduction = attrs.evolve(peers[1].introduction, memory=7)
    found = coordinator.connect(peers.nodes, WAIT)
    assert [peer.node for peer in found] == [str(peer.address) for peer in peers]
    assert [peer.memory for peer in found] == [0, 7, 0]
    assert [member.node for member in coordinator.members] == ["stage-0", "stage-1", "stage-2"]


def test_a_peer_is_known_by_the_address_that_it_was_found_at(
    scripted_peers: Any, coordinator: Coordinator
) -> None:
    """One that listens on all of its addresses cannot say which of them the others use, and is
    not taken for one machine with all others that cannot."""
    peers = scripted_peers(2, memory=16 << 30)
    for peer in peers:
        peer.introduction = attrs.evolve(peer.introduction, node=f"0.0.0.0:{peer.address.port}")
    hosts = ("127.0.0.1", "localhost")
    addresses = [Address(host, peer.address.port) for host, peer in zip(hosts, peers, strict=True)]
    found = coordinator.connect(named(*addresses), WAIT)
    assert [peer.node for peer in found] == list(map(str, addresses))
    assert free_memory(found) == [16 << 30] * 2


def test_all_that_cannot_be_reached_are_named(
    scripted_peers: Any, coordinator: Coordinator
) -> None:
    """Nobody at the address, another secret: one error has both, each with its way out."""
    [good] = scripted_peers(1)
    [other] = scripted_peers(1)
    other.gate._secret = ClusterSecret(b"another secret of the tests")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = Address("127.0.0.1", closed.getsockname()[1])
    with pytest.raises(BringUpError) as caught:
        coordinator.connect(named(good.address, other.address, nobody), WAIT)
    assert caught.value.phase == "connect"
    assert [(f.node, f.address, f.reason) for f in caught.value.failures] == [
        ("stage-1", str(other.address), "secret"),
        ("stage-2", str(nobody), "unreachable"),
    ]
    assert "nothing was started" in str(caught.value)


def test_a_coordinator_that_has_too_much_to_say_blames_no_peer(scripted_peers: Any) -> None:
    """The error is about this node and what helps, and nobody is dialled."""
    families = tuple(f"family-{n:040d}" for n in range(900))
    with Coordinator(SECRET, attrs.evolve(OURS, families=families), grace=ENDLESS) as coordinator:
        with pytest.raises(TooMuchToSay, match=r"^this node has too much.*DISABLE_PLUGINS\.$"):
            connect(coordinator, scripted_peers(2))
        assert coordinator.members == ()


def test_a_peer_may_start_later(scripted_peers: Any, coordinator: Coordinator) -> None:
    """Where nothing listens yet, the coordinator says so once, and goes on trying."""
    [late] = scripted_peers(1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = Address("127.0.0.1", closed.getsockname()[1])
    waited: list[Address] = []

    def start(told: Address) -> None:
        waited.append(told)
        late.call(late.gate.listen(address))

    found = coordinator.connect(named(address), WAIT, patience=WAIT, on_waiting=start)
    assert waited == [address]
    assert [peer.role for peer in found] == ["peer"]


def test_whoever_is_there_is_pinged_while_others_are_waited_for(
    scripted_peers: Any, coordinator: Coordinator
) -> None:
    """A peer need not be given up by its own grace because another one starts much later."""
    early, late = scripted_peers(2)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = Address("127.0.0.1", closed.getsockname()[1])
    answer = early.answer
    pings: list[int] = []

    def count(peer: Any, message: ToPeer) -> ToCoordinator | None:
        if isinstance(message, Ping):
            pings.append(message.number)
            if len(pings) == 2:
                late.call(late.gate.listen(address))
        answered: ToCoordinator | None = answer(peer, message)
        return answered

    early.answer = count
    coordinator.connect(named(early.address, address), WAIT, patience=WAIT)
    assert pings[:2] == [0, 0]


def test_nobody_is_waited_for_in_vain(scripted_peers: Any, coordinator: Coordinator) -> None:
    """A peer that can never be had ends the waiting for those that may still come."""
    [other] = scripted_peers(1)
    other.gate._secret = ClusterSecret(b"another secret of the tests")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = Address("127.0.0.1", closed.getsockname()[1])
    with pytest.raises(BringUpError) as caught:
        coordinator.connect(named(nobody, other.address), WAIT, patience=ENDLESS)
    assert [failure.reason for failure in caught.value.failures] == ["unreachable", "secret"]


def test_three_questions_one_after_the_other(scripted_peers: Any, coordinator: Coordinator) -> None:
    """All peers hear offer, commit and activate, and the phases' times are returned."""
    peers = scripted_peers(3)
    connect(coordinator, peers)
    seconds = coordinator.bring_up(peers.offers(), WAIT)
    assert list(seconds) == ["offer", "commit", "activate"]
    for stage, peer in enumerate(peers):
        peer.wait_for(lambda peer=peer: len(peer.heard) == 3)
        assert peer.heard == [peers.offers()[stage], Commit("s"), Activate("s")]


Fault = Callable[[Any, ToPeer], ToCoordinator | None]


def refuses(peer: Any, message: ToPeer) -> ToCoordinator | None:
    return Refused("s", "memory", "Too little. Stop something.")


def is_silent(peer: Any, message: ToPeer) -> ToCoordinator | None:
    return None


def hangs_up(peer: Any, message: ToPeer) -> ToCoordinator | None:
    peer.channel.close()
    return None


def means_another_session(peer: Any, message: ToPeer) -> ToCoordinator | None:
    return Refused("another", "busy", "Never mind.")


def talks_nonsense(peer: Any, message: ToPeer) -> ToCoordinator | None:
    peer.channel.session.sock.send(b"\x05\0\0\0" + 60 * b"x")
    return None


@pytest.mark.parametrize("kind", [Offer, Commit, Activate])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (refuses, "memory"),
        (is_silent, "silent"),
        (hangs_up, "lost"),
        (means_another_session, "silent"),
        (talks_nonsense, "lost"),
    ],
)
def test_one_no_releases_all(
    scripted_peers: Any, coordinator: Coordinator, kind: type, fault: Fault, reason: str
) -> None:
    """Whatever one peer does at any question, the error names it, and the others are let go."""
    peers = scripted_peers(2)
    agree = peers[1].answer
    peers[1].answer = lambda peer, message: (
        fault(peer, message) if isinstance(message, kind) else agree(peer, message)
    )
    connect(coordinator, peers)
    with pytest.raises(BringUpError) as caught:
        coordinator.bring_up(peers.offers(), 0.3)
    [failure] = caught.value.failures
    assert (failure.node, failure.reason) == ("stage-1", reason)
    assert caught.value.phase == kind.__name__.lower()
    peers[0].wait_for(lambda: peers[0].heard_a(Release))
    later = {Offer: (Commit, Activate), Commit: (Activate,), Activate: ()}[kind]
    assert not any(isinstance(message, later) for message in peers[0].heard)


def test_a_peer_that_was_lost_before_the_offer(
    scripted_peers: Any, coordinator: Coordinator
) -> None:
    """Whoever goes while the plan is made is named when the offer is due."""
    peers = scripted_peers(2)
    connect(coordinator, peers)
    peers[0].hang_up()
    while coordinator.members[0].loss is None:
        time.sleep(0.001)
    with pytest.raises(BringUpError, match=r"stage-0 @ .*closed the connection"):
        coordinator.bring_up(peers.offers(), 0.3)


def test_reports_of_this_session_reach_the_listener(
    scripted_peers: Any, coordinator: Coordinator
) -> None:
    """A report of another session, or in another stage's name, is not passed on."""
    peers, heard = scripted_peers(2), Heard()
    connect(coordinator, peers)
    coordinator.listen(heard)
    coordinator.bring_up(peers.offers(), WAIT)
    peers[1].say(Reported("another", Loading(1, 1, 9)))
    peers[1].say(Reported("s", Loading(0, 2, 9)))
    peers[1].say(Reported("s", Loading(1, 3, 9)))
    heard.wait_for(lambda: bool(heard.reports))
    assert heard.reports == [(1, Loading(1, 3, 9))]


def test_a_report_before_any_offer_means_nothing(
    scripted_peers: Any, coordinator: Coordinator
) -> None:
    """A report in no session's name changes nothing, and its peer is still heard."""
    peers, heard = scripted_peers(2), Heard()
    connect(coordinator, peers)
    coordinator.listen(heard)
    peers[1].say(Reported("", Loading(1, 1, 9)))
    peers[1].hang_up()
    heard.wait_for(lambda: bool(heard.losses))
    assert heard.reports == []
    assert "closed the connection" in heard.losses[0][1].what


def test_a_message_that_breaks_its_hearer_is_told(
    scripted_peers: Any, coordinator: Coordinator
) -> None:
    """The peer is lost at once and with that cause, not as one that is silent."""
    peers = scripted_peers(2)

    class Breaks(Heard):
        def report(self, stage: int, report: Report) -> None:
            raise LookupError("no such thing")

    heard = Breaks()
    connect(coordinator, peers)
    coordinator.listen(heard)
    coordinator.bring_up(peers.offers(), WAIT)
    peers[1].say(Reported("s", Loading(1, 3, 9)))
    heard.wait_for(lambda: bool(heard.losses))
    [(stage, error)] = heard.losses
    assert stage == 1
    assert "LookupError: no such thing" in error.what


def test_a_listener_that_breaks_does_not_end_the_watch(scripted_peers: Any) -> None:
    """A peer that grows silent is still noticed."""
    peers = scripted_peers(2)
    ticks = threading.Event()

    class Breaks(Heard):
        def tick(self, now: float) -> None:
            ticks.set()
            raise LookupError("no such thing")

    heard = Breaks()
    with Coordinator(SECRET, OURS, grace=0.4) as coordinator:
        connect(coordinator, peers)
        coordinator.listen(heard)
        assert ticks.wait(WAIT)
        agree = peers[1].answer
        peers[1].answer = lambda peer, message: (
            None if isinstance(message, Ping) else agree(peer, message)
        )
        heard.wait_for(lambda: bool(heard.losses))
    [(stage, error)] = heard.losses
    assert stage == 1
    assert "has not answered" in error.what


def test_a_listener_that_breaks_at_one_loss_hears_of_the_next(scripted_peers: Any) -> None:
    """The peers that are silent together are all told, whatever becomes of the first of them."""
    peers = scripted_peers(2)

    class Breaks(Heard):
        def lost(self, stage: int, error: PeerLost) -> None:
            super().lost(stage, error)
            raise LookupError("no such thing")

    heard = Breaks()
    with Coordinator(SECRET, OURS, grace=0.4) as coordinator:
        connect(coordinator, peers)
        coordinator.listen(heard)
        for peer in peers:
            peer.answer = lambda peer, message: None
        heard.wait_for(lambda: len(heard.losses) == 2)
    assert {stage for stage, _ in heard.losses} == {0, 1}
    assert all("has not answered" in error.what for _, error in heard.losses)


def test_reports_wait_for_the_listener(scripted_peers: Any, coordinator: Coordinator) -> None:
    """A stage may fail before anybody listens, such as when it cannot dial the next one."""
    peers, heard = scripted_peers(2), Heard()
    connect(coordinator, peers)
    coordinator.bring_up(peers.offers(), WAIT)
    peers[0].say(Reported("s", Loading(0, 1, 9)))
    coordinator.listen(heard)
    heard.wait_for(lambda: bool(heard.reports))
    assert heard.reports == [(0, Loading(0, 1, 9))]


def test_a_loss_is_told_once(scripted_peers: Any, coordinator: Coordinator) -> None:
    """A peer that hangs up is lost with its name and address, also to who listens later."""
    peers, heard, later = scripted_peers(2), Heard(), Heard()
    connect(coordinator, peers)
    coordinator.listen(heard)
    coordinator.bring_up(peers.offers(), WAIT)
    peers[1].hang_up()
    heard.wait_for(lambda: bool(heard.losses))
    [(stage, error)] = heard.losses
    assert (stage, error.node, error.address) == (1, "stage-1", str(peers[1].address))
    coordinator.listen(later)
    later.wait_for(lambda: bool(later.losses))
    assert later.losses == [(1, error)]


@pytest.mark.parametrize("silent", [None, 60.0])
def test_silence_beyond_the_grace(scripted_peers: Any, silent: float | None) -> None:
    """A peer that answers no ping is lost, and so is one whose worker shows no life."""
    peers, heard = scripted_peers(2), Heard()
    agree = peers[0].answer
    if silent is None:
        peers[0].answer = lambda peer, message: (
            None if isinstance(message, Ping) else agree(peer, message)
        )
    else:
        peers[0].silent = silent
    with Coordinator(SECRET, OURS, grace=0.4) as coordinator:
        coordinator.listen(heard)
        connect(coordinator, peers)
        heard.wait_for(lambda: bool(heard.losses))
        [(stage, error)] = heard.losses
        assert stage == 0
        expected = "has not answered for" if silent is None else "worker process has given no sign"
        assert expected in error.what


def test_offsets_of_clocks(scripted_peers: Any, coordinator: Coordinator) -> None:
    """Pongs tell how far a peer's clock is ahead; on one clock it is nothing."""
    peers = scripted_peers(2)
    peers[1].ahead = 1000.0
    connect(coordinator, peers)
    while not all(member.clock._readings for member in coordinator.members):
        time.sleep(0.001)
    assert coordinator.offset(0) == 0.0
    assert coordinator.offset(1) == pytest.approx(1000.0, abs=1.0)


def test_pongs_nobody_asked_for_say_nothing(scripted_peers: Any, coordinator: Coordinator) -> None:
    """A number that was not sent, or twice the same, does not move the clock."""
    [peer] = peers = scripted_peers(1)
    connect(coordinator, peers)
    for _ in range(3):
        peer.say(Pong(12345, 99.0))
    assert coordinator.offset(0) == 0.0


def test_the_end_releases_everybody(scripted_peers: Any) -> None:
    """Leaving the context lets the peers go and hangs up."""
    peers = scripted_peers(2)
    with Coordinator(SECRET, OURS, grace=ENDLESS) as coordinator:
        connect(coordinator, peers)
        coordinator.bring_up(peers.offers(), WAIT)
    for peer in peers:
        peer.wait_for(lambda peer=peer: peer.heard_a(Release))


def test_released_peers_can_be_brought_up_again(
    scripted_peers: Any, coordinator: Coordinator
) -> None:
    """After a refusal, the same connections carry the next attempt."""
    peers = scripted_peers(2)
    agree, peers[0].answer = peers[0].answer, is_silent
    connect(coordinator, peers)
    with pytest.raises(BringUpError):
        coordinator.bring_up(peers.offers(), 0.2)
    peers[0].answer = agree
    again = peers.offers(session="t")
    assert list(coordinator.bring_up(again, WAIT)) == ["offer", "commit", "activate"]


def test_an_interrupted_bring_up_releases_all(scripted_peers: Any) -> None:
    """When the context ends while a peer still thinks, as on Ctrl-C, all hear that it is over."""
    peers = scripted_peers(2)
    peers[1].answer = is_silent
    with Coordinator(SECRET, OURS, grace=ENDLESS) as coordinator:
        connect(coordinator, peers)
        asking = threading.Thread(target=_swallow, args=(coordinator, peers), daemon=True)
        asking.start()
        for peer in peers:
            peer.wait_for(lambda peer=peer: peer.heard_a(Offer))
    for peer in peers:
        peer.wait_for(lambda peer=peer: peer.heard_a(Release))
    asking.join(WAIT)
    assert not asking.is_alive(), "whoever waits for the answers does not wait for ever"


def _swallow(coordinator: Coordinator, peers: Any) -> None:
    try:
        coordinator.bring_up(peers.offers(), WAIT)
    except BaseException:
        return
