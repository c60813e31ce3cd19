"""A peer's states, with a clock that the tests turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from mlxcel.cluster.handshake import Accept, Refuse
from mlxcel.cluster.introduction import Introduction, Purpose
from mlxcel.cluster.messages import (
    Accepted,
    Activate,
    Activated,
    Commit,
    Committed,
    ModelIdentity,
    Offer,
    Ping,
    Refused,
    Release,
    Reported,
)
from mlxcel.cluster.peer_state import (
    Abandon,
    Effect,
    HangUp,
    Judge,
    Log,
    PeerState,
    Run,
    Send,
    Start,
)
from mlxcel.errors import WorkerDied, WorkerFailed
from mlxcel.pipeline.report import Ended, Failed, Loaded, Loading
from mlxcel.tensor.options import TensorParallel

FOLDER = Path("model")
OFFER = Offer(
    "s", "stage-1", "f", 1, 3, 2, 4, None, False, ModelIdentity("0", (), 6), "", "d", "c", {}, {},
    1, "tcp", 4, 60.0, {"1-2": "10.0.0.4:1"},
)  # fmt: skip
COORDINATOR = Introduction("coordinator", "coordinator", "c", {}, {}, ())
NEIGHBOUR = attrs.evolve(COORDINATOR, node="10.0.0.2:1", role="peer")
GRACE, PATIENCE = 4.0, 30.0


def acts(effects: list[Effect]) -> list[Effect]:
    """What is to be done, without the lines for the operator."""
    return [effect for effect in effects if not isinstance(effect, Log)]


def logs(effects: list[Effect]) -> str:
    return "\n".join(effect.text for effect in effects if isinstance(effect, Log))


def link(name: str, session: str = "s") -> Introduction:
    return attrs.evolve(NEIGHBOUR, purpose=Purpose("data", session, name, "pp_activation"))


class Driven(PeerState):
    """A peer that a test brings into a state; the time is 0 until something moves it."""

    def to(self, state: str, offer: Offer = OFFER) -> Driven:
        steps = {
            "connected": lambda: self.connected("10.0.0.1:5", 0.0),
            "judging": lambda: self.receive(offer, 0.0),
            "offered": lambda: self.judged(offer, FOLDER, 0.0),
            "committed": lambda: self.receive(Commit("s"), 0.0),
            "starting": lambda: self.receive(Activate("s"), 0.0),
            "active": self.link_all,
        }
        for name, step in steps.items():
            if self.state == state:
                break
            step()
            assert self.state == name
        return self

    def link_all(self) -> None:
        assert self.offer is not None
        self.written(self.offer, None)
        for wanted in self.offer.links:
            self.linked(wanted.name)


@pytest.fixture
def peer() -> Driven:
    return Driven("c", GRACE, 0.0, PATIENCE)


STATES = ("connected", "judging", "offered", "committed", "starting", "active")


def test_a_whole_session(peer: Driven) -> None:
    """Each question has its answer, and the stage runs when all its links are made."""
    assert acts(peer.connected("10.0.0.1:5", 0.0)) == []
    assert acts(peer.receive(OFFER, 1.0)) == [Judge(OFFER)]
    assert acts(peer.judged(OFFER, FOLDER, 2.0)) == [Send(Accepted("s"))]
    assert acts(peer.receive(Commit("s"), 3.0)) == [Send(Committed("s"))]
    assert acts(peer.linked("0-1")) == []  # a neighbour may be faster than the coordinator
    assert acts(peer.receive(Activate("s"), 4.0)) == [Start(OFFER)]
    assert acts(peer.written(OFFER, None)) == [Send(Activated("s"))]
    assert acts(peer.linked("1-2")) == [Run(OFFER, FOLDER)]
    assert peer.state == "active"
    for report in (Loading(1, 1, 2), Loaded(1, 2, 0.5), Ended(1, 0.0, None, None)):
        assert acts(peer.reported(report)) == [Send(Reported("s", report))]
    assert acts(peer.receive(Release("s", "done"), 5.0)) == [Abandon(OFFER, "done", True)]
    assert peer.state == "connected"
    assert acts(peer.lost("closed")) == []
    assert (peer.state, peer.coordinator, peer.sessions) == ("waiting", "", 1)


RANK = attrs.evolve(
    OFFER,
    node="s1-r1",
    rank=1,
    tensor=TensorParallel(3),
    dials={"s1r1-s1r2": "10.0.0.5:1", "s1r1-s2r1": "10.0.0.4:1"},
)
"""Of three ranks the middle one: it dials the next stage and the rank after it."""


def test_a_rank_waits_for_all_its_links(peer: Driven) -> None:
    """It runs when its stage before, its stage after and the ranks beside it are connected."""
    peer.to("committed", RANK)
    assert acts(peer.receive(Activate("s", ("a:1", "b:2", "c:3")), 0.0)) == [Start(RANK)]
    peer.written(RANK, None)
    for name in ("s1r1-s1r2", "s1r1-s2r1", "s0r1-s1r1"):
        assert acts(peer.linked(name)) == []
    effects = peer.linked("s1r0-s1r1")
    assert acts(effects) == [Run(RANK, FOLDER, ("a:1", "b:2", "c:3"))]
    assert logs(effects) == "loading as rank 1 of stage 1"
    [said] = acts(peer.failed(WorkerDied(1, 7, "killed by SIGKILL")))
    assert isinstance(said, Send) and isinstance(said.message, Reported)
    assert (said.message.report.stage, said.message.report.rank) == (1, 1)


def test_a_rank_whose_links_others_make_still_says_that_it_is_activated(peer: Driven) -> None:
    """All of them may be there before the TOML is written; the coordinator waits for both."""
    corner = attrs.evolve(OFFER, stage=2, node="s2-r1", rank=1, tensor=TensorParallel(2), dials={})
    peer.to("committed", corner)
    assert acts(peer.receive(Activate("s", ()), 0.0)) == [Start(corner)]
    for link in corner.links:
        assert acts(peer.linked(link.name)) == []
    assert acts(peer.written(corner, None)) == [Send(Activated("s")), Run(corner, FOLDER)]


def test_a_link_has_its_class_of_traffic(peer: Driven) -> None:
    """Collectives and hidden states cannot get into each other's connections."""
    peer.to("starting", RANK)
    for name, traffic in (("s1r0-s1r1", "tp_collective"), ("s0r1-s1r1", "pp_activation")):
        right = attrs.evolve(NEIGHBOUR, purpose=Purpose("data", "s", name, traffic))
        other = "pp_activation" if traffic == "tp_collective" else "tp_collective"
        wrong = attrs.evolve(NEIGHBOUR, purpose=Purpose("data", "s", name, other))
        assert peer.verdict(right) == Accept()
        assert isinstance(peer.verdict(wrong), Refuse)


def test_links_that_are_missing_are_named(peer: Driven) -> None:
    """A rank that is never connected is a failure that says which connection it is."""
    peer.to("starting", RANK)
    for name in ("s1r1-s1r2", "s1r1-s2r1", "s0r1-s1r1"):
        peer.linked(name)
    effects: list[Effect] = []
    for now in range(int(PATIENCE) + 2):
        peer.receive(Ping(now), now)
        effects += peer.tick(now)
    [said] = acts(effects)
    assert isinstance(said, Send)
    assert isinstance(said.message, Reported) and isinstance(said.message.report, Failed)
    assert "the links s1r0-s1r1" in str(said.message.report.error)


def test_only_one_coordinator_at_a_time(peer: Driven) -> None:
    """Another is told whose session it is, until that one has gone."""
    assert peer.verdict(COORDINATOR) == Accept()
    peer.to("active")
    refused = peer.verdict(COORDINATOR)
    assert isinstance(refused, Refuse)
    assert "busy with the session of 10.0.0.1:5" in refused.reason
    peer.lost("closed")
    assert peer.verdict(COORDINATOR) == Accept()


@pytest.mark.parametrize(
    ("dialer", "told"),
    [
        (attrs.evolve(COORDINATOR, cluster="x"), "belongs to the cluster 'c', not 'x'"),
        (NEIGHBOUR, "only a coordinator"),
        (link("0-1"), "no session of that name"),
    ],
)
def test_who_is_not_let_in(peer: Driven, dialer: Introduction, told: str) -> None:
    """Foreign clusters, peers that want to command, and links of no session."""
    refused = peer.verdict(dialer)
    assert isinstance(refused, Refuse)
    assert told in refused.reason


@pytest.mark.parametrize("state", STATES)
def test_links_are_welcome_once_they_can_come(peer: Driven, state: str) -> None:
    """From the offer's acceptance on, since a neighbour may be activated first."""
    peer.to(state)
    welcome = state in ("offered", "committed", "starting")
    assert isinstance(peer.verdict(link("0-1")), Accept if welcome else Refuse)
    for foreign in (link("0-1", "other"), link("1-2"), link("engine-0")):
        assert isinstance(peer.verdict(foreign), Refuse)
    if welcome:
        peer.linked("0-1")
        assert isinstance(peer.verdict(link("0-1")), Refuse)  # a second one of that name


def test_a_refusal_leaves_the_peer_ready(peer: Driven) -> None:
    """The next offer on the same connection is judged anew."""
    peer.to("judging")
    no = Refused("s", "memory", "too little")
    effects = peer.judged(OFFER, no, 0.0)
    assert acts(effects) == [Send(no)]
    assert "refused an offer (memory): too little" in logs(effects)
    again = attrs.evolve(OFFER, session="t")
    assert acts(peer.receive(again, 0.0)) == [Judge(again)]


def test_a_verdict_on_a_withdrawn_offer_counts_for_nothing(peer: Driven) -> None:
    """Neither when the coordinator has gone, nor when it has made another offer."""
    peer.to("judging")
    peer.receive(Release("s", "changed my mind"), 0.0)
    assert peer.judged(OFFER, FOLDER, 0.0) == []
    peer.receive(attrs.evolve(OFFER, session="t"), 0.0)
    assert peer.judged(OFFER, FOLDER, 0.0) == []
    assert peer.state == "judging"


@pytest.mark.parametrize("state", STATES[1:])
def test_a_second_offer_is_refused(peer: Driven, state: str) -> None:
    """The first stays in force."""
    peer.to(state)
    effects = acts(peer.receive(attrs.evolve(OFFER, session="t"), 0.0))
    assert [type(effect) for effect in effects] == [Send]
    assert isinstance(effects[0], Send) and isinstance(effects[0].message, Refused)
    assert (effects[0].message.session, effects[0].message.reason) == ("t", "busy")
    assert peer.state == state


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("message", [Commit("x"), Activate("x"), Release("x", "")])
def test_messages_of_other_sessions_are_ignored(peer: Driven, state: str, message: Any) -> None:
    """Whatever the state."""
    peer.to(state)
    assert peer.receive(message, 0.0) == []
    assert peer.state == state


@pytest.mark.parametrize(
    ("state", "message"),
    [("judging", Commit("s")), ("offered", Activate("s")), ("active", Commit("s"))],
)
def test_a_question_out_of_turn_ends_the_session(
    peer: Driven, state: str, message: Commit | Activate
) -> None:
    """Such a coordinator is not to be relied on: the connection is closed."""
    peer.to(state)
    effects = acts(peer.receive(message, 0.0))
    assert [type(effect) for effect in effects] == [Abandon, HangUp]


@pytest.mark.parametrize("state", STATES[1:])
@pytest.mark.parametrize("how", ["release", "lost"])
def test_a_session_can_end_at_any_time(peer: Driven, state: str, how: str) -> None:
    """What was begun is abandoned, one line says why, and the peer can be had again."""
    peer.to(state)
    effects = peer.receive(Release("s", "why"), 0.0) if how == "release" else peer.lost("why")
    [abandon] = acts(effects)
    assert isinstance(abandon, Abandon)
    assert abandon.started == (state in ("starting", "active"))
    assert "released: " in logs(effects) and "why" in logs(effects)
    if how == "lost":
        assert (peer.state, peer.coordinator) == ("waiting", "")
        peer.connected("10.0.0.9:9", 0.0)
    again = attrs.evolve(OFFER, session="t")
    assert acts(peer.receive(again, 0.0)) == [Judge(again)]


def test_a_toml_that_cannot_be_written_is_a_refusal(peer: Driven) -> None:
    """The coordinator learns why; nothing was started."""
    peer.to("starting")
    effects = acts(peer.written(OFFER, "the disk is full"))
    assert effects == [
        Send(Refused("s", "config", "the disk is full")),
        Abandon(OFFER, "the disk is full", True),
    ]
    assert peer.state == "connected"


@pytest.mark.parametrize("state", STATES)
def test_a_silent_coordinator_is_left(peer: Driven, state: str) -> None:
    """Without a sign of life for longer than the grace, whatever the state; pings are signs."""
    peer.to(state)
    assert ticks(peer, 0.0, GRACE) == []
    peer.receive(Ping(1), GRACE)
    assert ticks(peer, GRACE, 2 * GRACE) == []
    effects = ticks(peer, 2 * GRACE, 2 * GRACE + 1)
    assert isinstance(effects[-1], HangUp)
    assert peer.state == "waiting"


def ticks(peer: Driven, start: float, stop: float) -> list[Effect]:
    """Let time pass as it does; what comes of it."""
    effects: list[Effect] = []
    while start < stop:
        start = min(stop, start + 0.5)
        effects += acts(peer.tick(start))
    return effects


def test_time_in_which_the_peer_slept_is_not_held_against_others(peer: Driven) -> None:
    """Stopped for an hour, it still waits for the next ping as long as before."""
    peer.to("active")
    assert peer.tick(3600.0) == []
    assert ticks(peer, 3600.0, 3601.0) == []


def alive(peer: Driven, start: float, stop: float) -> list[Effect]:
    """Let time pass with pings."""
    effects: list[Effect] = []
    while start < stop:
        start = min(stop, start + 0.5)
        peer.receive(Ping(0), start)
        effects += acts(peer.tick(start))
    return effects


@pytest.mark.parametrize(("state", "waited"), [("offered", "commit"), ("committed", "activation")])
def test_a_question_that_does_not_come_ends_the_session(
    peer: Driven, state: str, waited: str
) -> None:
    """A coordinator that is alive and says nothing more does not keep the peer."""
    peer.to(state)
    assert alive(peer, 0.0, PATIENCE) == []
    abandon, hang_up = alive(peer, PATIENCE, PATIENCE + 0.5)
    assert isinstance(abandon, Abandon) and isinstance(hang_up, HangUp)
    assert abandon.reason == f"no {waited} within 30 s"


def test_links_that_do_not_come_are_reported(peer: Driven) -> None:
    """The coordinator learns which; it decides what to do."""
    peer.to("starting")
    peer.linked("0-1")
    [said] = alive(peer, 0.0, PATIENCE + 1)
    assert isinstance(said, Send) and isinstance(said.message, Reported)
    assert isinstance(said.message.report, Failed)
    assert "the links 1-2" in str(said.message.report.error)


def test_an_active_stage_has_all_the_time(peer: Driven) -> None:
    """Only silence ends a run."""
    peer.to("active")
    assert alive(peer, 0.0, 10 * PATIENCE) == []


def test_a_dead_worker_is_reported_once(peer: Driven) -> None:
    """As a failure of its stage, unless it has said goodbye."""
    died = WorkerDied(1, 4711, "killed by SIGKILL")
    peer.to("active")
    assert acts(peer.failed(died)) == [Send(Reported("s", Failed(1, died)))]
    assert acts(peer.failed(died)) == []
    peer.lost("closed")
    peer.to("active")
    peer.reported(Ended(1, 0.0, None, None))
    assert acts(peer.failed(died)) == []


def test_what_a_worker_says_is_told_to_the_operator(peer: Driven) -> None:
    """Loading, ready and failed are lines; progress is not."""
    peer.to("starting")
    peer.written(OFFER, None)
    peer.linked("0-1")
    assert "loading as stage 1" in logs(peer.linked("1-2"))
    assert logs(peer.reported(Loading(1, 1, 2))) == ""
    assert "ready as stage 1: 2 bytes" in logs(peer.reported(Loaded(1, 2, 0.5)))
    failed = Failed(1, WorkerFailed(1, "X", "it broke"))
    assert "stage 1 has failed: it broke" in logs(peer.reported(failed))


def test_a_broken_link_is_counted(peer: Driven) -> None:
    """A stage whose link broke, or brought forged frames, shows in a metric and in the log."""
    peer.to("active")
    assert "a data link is broken: forged" in logs(
        peer.reported(Ended(1, 0.0, None, None, "forged"))
    )
    assert peer.broken_links == 1


def test_an_ordinary_end_counts_nothing(peer: Driven) -> None:
    """A stage that was told to end has no broken link."""
    peer.to("active")
    peer.reported(Ended(1, 0.0, None, None))
    assert peer.broken_links == 0


def test_reports_outside_of_a_session_are_dropped(peer: Driven) -> None:
    """A worker that is being replaced says what interests nobody."""
    peer.to("offered")
    assert peer.reported(Ended(1, 0.0, None, None)) == []
    assert peer.failed(WorkerDied(1, 1, "killed by SIGKILL")) == []
