"""Rank 0 leads, the others follow: over socket pairs, without a model."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxcel.errors import ChannelClosed, RankLost, RanksDisagree, SamplingFailed, WireError
from mlxcel.pipeline.control import DataSocket, Job
from mlxcel.pipeline.decision import StepDecision, pieces
from mlxcel.pipeline.follower import FollowingInbox, NoOutbox
from mlxcel.pipeline.group import RankGroup
from mlxcel.pipeline.leader import LeadingInbox
from mlxcel.pipeline.link import Link, memory_link
from mlxcel.pipeline.meeting import meet
from mlxcel.pipeline.operations import New, Release, Sampling
from mlxcel.pipeline.report import Beat, Ended, Failed, Loaded, Report
from mlxcel.pipeline.socket_link import ConnectionOutbox
from mlxcel.pipeline.step import Message, Step, StepFailed, Stop, Tokens
from mlxcel.pipeline.worker import run_stage
from mlxcel.stage.contract import StageSpec
from mlxcel.stage.serve import RECEIVE
from mlxcel.stage.serve import _links as serve_links
from mlxcel.tensor.options import TensorParallel
from mlxcel.testing.doubles import ScriptedExecutor
from mlxcel.transport.plain import PlainConnection
from mlxcel.wire.tensor import WireTensor

TENSORS = {"tokens": WireTensor("int32", (1, 1), b"\1\0\0\0")}
ADMIT, DECODE = Step(0, 0, (New(0, 7, Sampling()),)), Step(1, 0, (), TENSORS, sample=True)
SECONDS = 20.0


@pytest.fixture
def groups() -> Iterator[tuple[RankGroup, RankGroup]]:
    """Both ranks of stage 1."""
    here, there = socket.socketpair()
    leader = RankGroup(1, 0, 2, {1: PlainConnection(here, "rank 1")}, SECONDS)
    follower = RankGroup(1, 1, 2, {0: PlainConnection(there, "rank 0")}, SECONDS)
    yield leader, follower
    leader.close()
    follower.close()


Groups = tuple[RankGroup, RankGroup]


def spec(rank: int, stage: int = 0, count: int = 1) -> StageSpec:
    tensor = TensorParallel(2)
    return StageSpec(Path("none"), "none", stage, count, stage, stage + 1, tensor=tensor, rank=rank)


def link(*messages: Message) -> Link:
    made = memory_link(8, "a link")
    for message in messages:
        made.send(message)
    return made


def test_ranks_without_links_get_the_leaders_steps(groups: Groups) -> None:
    """In the first stage a decision carries its step, and at last the Stop."""
    leader = LeadingInbox(link(ADMIT, DECODE, Stop()), groups[0], carry=True)
    follower = FollowingInbox(groups[1], None)
    assert [leader.receive(1) for _ in range(3)] == [ADMIT, DECODE, Stop()]
    assert follower.receive(1) == ADMIT
    decoded = follower.receive(1)
    assert isinstance(decoded, Step) and (decoded.seq, decoded.sample) == (1, True)
    assert bytes(decoded.tensors["tokens"].data) == TENSORS["tokens"].data
    assert follower.receive(1) == Stop()


def test_ranks_with_links_take_their_own_steps(groups: Groups) -> None:
    """In later stages a decision says when; what is run comes from the rank's own link."""
    own = Step(1, 0, (), {"h": "of rank 1"}, sample=True)
    leader = LeadingInbox(link(DECODE), groups[0], carry=False)
    follower = FollowingInbox(groups[1], link(own))
    leader.receive(1)
    assert follower.receive(1) is own


def test_a_rank_that_lags_behind_gets_all(groups: Groups) -> None:
    """Rank 0 is done with steps without tensors, and more come, before another has run the first.

    Only it gives credits back, so what waits for the others is bounded by their connection.
    """
    here, there = socket.socketpair()
    sending = ConnectionOutbox(PlainConnection(here, "rank 1"), "a link", SECONDS, lambda h: h)
    steps = [Step(number, 0, (Release(number),)) for number in range(12)]
    leader = LeadingInbox(memory_link(len(steps), "rank 0's"), groups[0], carry=False)
    sockets = {RECEIVE: (DataSocket("receive", "a link", "rank 1"), there)}
    job = Job(spec(1, stage=1, count=2), credits=2, timeout=SECONDS)
    connections = {RECEIVE: PlainConnection(there, "rank 1")}
    follower, _ = serve_links(job, sockets, connections, groups[1])
    for step in steps:
        sending.send(step)
        leader._inner.send(step)  # type: ignore[attr-defined]
        assert leader.receive(0) == step
    sending.close()
    assert [follower.receive(SECONDS) for _ in steps] == steps
    follower.close()


@pytest.mark.parametrize(
    ("found", "words"),
    [(Step(5, 0, (), TENSORS), "brought step 5"), (Stop(), "brought a Stop")],
)
def test_ranks_that_disagree_stop(groups: Groups, found: Message, words: str) -> None:
    """Another step than the one decided is told with both, not run."""
    LeadingInbox(link(DECODE), groups[0], carry=False).receive(1)
    with pytest.raises(RanksDisagree, match=rf"rank 1 of stage 1 .* step 1 \(decode\).*{words}"):
        FollowingInbox(groups[1], link(found)).receive(1)


def test_a_decision_without_its_step(groups: Groups) -> None:
    """In the first stage a decision that carries none is refused."""
    groups[0].send(1, pieces(StepDecision("decode", 3)), "a test")
    with pytest.raises(RanksDisagree, match=r"step 3 \(decode\).*nothing"):
        FollowingInbox(groups[1], None).receive(1)


def test_junk_instead_of_a_decision(groups: Groups) -> None:
    """What is no decision is malformed data."""
    groups[0].send(1, [b"junk"], "a test")
    with pytest.raises(WireError):
        FollowingInbox(groups[1], None).receive(1)


def test_a_leader_hands_out_nothing_but_steps(groups: Groups) -> None:
    """A failed step comes out of the last stage only; elsewhere its stage has ended."""
    leader = LeadingInbox(link(StepFailed(0, 0, 0, (), "x")), groups[0], carry=True)
    with pytest.raises(RanksDisagree, match="a StepFailed"):
        leader.receive(1)


def test_a_step_that_does_not_come_names_the_rank_before(groups: Groups) -> None:
    """Who decides has its step; if the own link brings none, the equal rank before is lost."""
    groups[1].timeout = 0.05
    LeadingInbox(link(DECODE), groups[0], carry=False).receive(1)
    lost = r"rank 1 of stage 0 is lost in handing on step 1 \(decode\): .* within 0.05 s"
    with pytest.raises(RankLost, match=lost):
        FollowingInbox(groups[1], link()).receive(1)


def test_closing_tells_the_others(groups: Groups) -> None:
    """A leader that is gone wakes a follower that waits for its decision, and is named."""
    follower = FollowingInbox(groups[1], None)
    closing = threading.Timer(0.05, LeadingInbox(link(), groups[0], carry=True).close)
    closing.start()
    with pytest.raises(RankLost, match="rank 0 of stage 1"):
        follower.receive(0)
    closing.join()


def test_ranks_meet(groups: Groups) -> None:
    """Nobody returns from the barrier before all have come."""
    came: list[int] = []

    def follow() -> None:
        came.append(1)
        meet(groups[1])

    thread = threading.Thread(target=follow)
    thread.start()
    meet(groups[0])
    assert came == [1]
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_rank_that_is_elsewhere_does_not_meet(groups: Groups) -> None:
    """A decision in place of the barrier is an error that names the rank."""
    groups[1].send(0, pieces(StepDecision("evict", 3)), "a test")
    with pytest.raises(RanksDisagree, match=r"rank 1 of stage 1 .* evict"):
        meet(groups[0])


def serve(
    given: StageSpec, build: Callable[[StageSpec], Any], *messages: Message
) -> tuple[list[Message], list[Report]]:
    """What a rank sends and reports, beats left out."""
    inbox, outbox = link(*messages, Stop()), memory_link(8, "out")
    reports: list[Report] = []
    run_stage(given, build, inbox, outbox, reports.append)
    sent = []
    try:
        while True:
            sent.append(outbox.receive(0))
    except ChannelClosed:
        pass
    return sent, [report for report in reports if not isinstance(report, Beat)]


def broken(error: Exception) -> Callable[[StageSpec], ScriptedExecutor]:
    def fail(step: Step) -> None:
        if step.seq == 1:
            raise error

    return lambda given: ScriptedExecutor(given, on_step=fail)


def test_a_rank_whose_step_fails_ends() -> None:
    """No other rank could go on without it."""
    error = ValueError("broken on purpose")
    sent, reports = serve(spec(0), broken(error), ADMIT, DECODE, Step(2, 0))
    assert sent == [Tokens(0, 0)]
    assert reports[-1] == Failed(0, error, 0)


def test_a_rank_that_cannot_sample_goes_on() -> None:
    """Drawing tokens is rank 0's alone: its failure is the answer to that step."""
    build = broken(SamplingFailed("LogitsError: no numbers"))
    sent, reports = serve(spec(0), build, ADMIT, DECODE, Step(2, 0))
    failed = StepFailed(1, 0, 0, (7,), "LogitsError: no numbers")
    assert sent == [Tokens(0, 0), failed, Tokens(2, 0), Stop()]
    assert isinstance(reports[-1], Ended)


def test_reports_say_which_rank() -> None:
    """All that a rank reports has its number."""
    _, reports = serve(spec(1), ScriptedExecutor, ADMIT)
    assert {report.rank for report in reports} == {1}
    assert any(isinstance(report, Loaded) for report in reports)


def test_a_failure_is_told_before_others_can_see_it() -> None:
    """Nothing is closed while the failure is not reported, so that no consequence comes first."""
    order: list[str] = []

    class Closing(ScriptedExecutor):
        def close(self) -> None:
            order.append("closed")

    def fail(step: Step) -> None:
        raise ValueError("broken on purpose")

    def report(given: Report) -> None:
        if isinstance(given, Failed):
            order.append("told")

    run_stage(spec(0), lambda s: Closing(s, on_step=fail), link(ADMIT), NoOutbox(), report)
    assert order == ["told", "closed"]
