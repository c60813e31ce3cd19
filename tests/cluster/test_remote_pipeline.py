"""A pipeline over the transport, with peers whose stages answer from a script."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.coordinator import Coordinator, Member
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.messages import Ping, Release, Reported
from mlxcel.cluster.remote_pipeline import RemotePipeline
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.engine.generation import Generation
from mlxcel.engine.slot import Request
from mlxcel.errors import DeadlineError, MlxcelError, PeerLinkBroken, PeerLost, WorkerFailed
from mlxcel.pipeline.report import Beat, Ended, Failed, Report
from mlxcel.pipeline.step import Step
from mlxcel.plugins import Plugins
from mlxcel.testing.doubles import ScriptedExecutor
from mlxcel.transport import TransportOptions
from mlxcel.transport.make import make_transport

SECRET = ClusterSecret(b"a secret of the tests")
OURS = Introduction("coordinator", "coordinator", "c", {}, {}, ())
WAIT = 20.0
CREDITS = 8
ENDLESS = 1000.0


@contextmanager
def brought_up(
    peers: Any, *, grace: float = ENDLESS, timeout: float = WAIT
) -> Iterator[RemotePipeline]:
    """A pipeline over ``peers``, not started; at the end all are released."""
    with Coordinator(SECRET, OURS, grace=grace) as coordinator:
        coordinator.connect(peers.nodes, WAIT)
        coordinator.bring_up(peers.offers(), WAIT)
        transport = make_transport(Plugins.discover(environ={}), "tcp", TransportOptions())
        yield RemotePipeline(coordinator, transport, grace=grace, credits=CREDITS, timeout=timeout)


def generate(pipeline: RemotePipeline, prompts: int = 4, tokens: int = 5) -> dict[int, list[Any]]:
    requests = [Request(index, (1, 2, 3), tokens) for index in range(prompts)]
    made: dict[int, list[Any]] = {index: [] for index in range(prompts)}
    for event in Generation(pipeline, requests, end_tokens=(), rows=1, chunk=2):
        made[event.index].append(event.token)
    return made


EXPECTED = {index: [1000 * index + n for n in range(5)] for index in range(4)}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_tokens_come_through_all_stages(scripted_peers: Any, count: int) -> None:
    """Steps go from peer to peer and answers come back, whatever the number of stages."""
    peers = scripted_peers(count)
    with brought_up(peers) as pipeline:
        pipeline.start()
        assert [loaded.stage for loaded in pipeline.loaded] == list(range(count))
        assert generate(pipeline) == EXPECTED
        statuses = pipeline.stop()
    assert [status.stage for status in statuses] == list(range(count))
    for peer in peers:
        peer.wait_for(lambda peer=peer: peer.heard_a(Release))


def test_progress_of_every_stage(scripted_peers: Any) -> None:
    """What the workers report while they load reaches the coordinator, stage by stage."""
    told: list[tuple[int, int, int]] = []
    with brought_up(scripted_peers(2)) as pipeline:
        pipeline.start(lambda stage, done, total: told.append((stage, done, total)))
        pipeline.stop()
    assert sorted(told) == [(0, 1, 1), (1, 1, 1)]


def test_what_fails_while_loading_names_the_peer(scripted_peers: Any) -> None:
    """A stage's own words arrive with the name and address of its peer, and all are released."""
    peers = scripted_peers(2)

    def fails() -> None:
        raise ValueError("the file is cut off")

    peers[1].executor = lambda spec: ScriptedExecutor(spec, on_load=fails)
    with brought_up(peers) as pipeline:
        with pytest.raises(PeerLost, match="ValueError: the file is cut off") as caught:
            pipeline.start()
        assert (caught.value.node, caught.value.address) == ("stage-1", str(peers[1].address))
        pipeline.stop(drain=False)
        for peer in peers:
            peer.wait_for(lambda peer=peer: peer.heard_a(Release))


def test_a_stage_that_does_not_load_is_named_with_its_address(scripted_peers: Any) -> None:
    """The operator learns on which machine to look, not only for which stage."""
    peers, go = scripted_peers(2), threading.Event()
    peers[1].executor = lambda spec: ScriptedExecutor(spec, on_load=lambda: go.wait(WAIT))
    with brought_up(peers, timeout=0.5) as pipeline:
        with pytest.raises(DeadlineError) as caught:
            pipeline.start()
        assert str(caught.value).startswith(f"stage-1 @ {peers[1].address} did not answer")
        go.set()
        pipeline.stop(drain=False)


def blocked(pipeline: RemotePipeline, peers: Any, stage: int) -> threading.Event:
    """Start ``pipeline`` so that ``stage`` stays in its first step until the event is set."""
    reached, go = threading.Event(), threading.Event()

    def wait(step: Step) -> None:
        reached.set()
        assert go.wait(WAIT)

    peers[stage].executor = lambda spec: ScriptedExecutor(spec, on_step=wait)
    pipeline.start()
    pipeline.submit(Step(0, 0))
    assert reached.wait(WAIT)
    return go


def answer_or_error(pipeline: RemotePipeline) -> MlxcelError:
    """What the engine gets when it waits for the next answer."""
    with pytest.raises(MlxcelError) as caught:
        pipeline.receive()
    return caught.value


@pytest.mark.parametrize("stage", [0, 1])
def test_a_peer_that_hangs_up_in_a_step(scripted_peers: Any, stage: int) -> None:
    """The engine wakes at once with an error that names node and address."""
    peers = scripted_peers(2)
    with brought_up(peers) as pipeline:
        go = blocked(pipeline, peers, 1 - stage)
        peers[stage].hang_up()
        error = answer_or_error(pipeline)
        assert isinstance(error, PeerLost)
        assert (error.node, error.address) == (f"stage-{stage}", str(peers[stage].address))
        assert "closed the connection" in error.what
        pipeline.stop(drain=False)
        peers[1 - stage].wait_for(lambda: peers[1 - stage].heard_a(Release))
        go.set()


def test_a_worker_that_dies_in_a_step(scripted_peers: Any) -> None:
    """What the supervisor says of its worker is what the engine gets, not the closed link."""
    peers = scripted_peers(2)
    with brought_up(peers) as pipeline:
        go = blocked(pipeline, peers, 1)
        peers[0].say(Reported("s", Failed(0, RuntimeError("killed by SIGKILL"))))
        error = answer_or_error(pipeline)
        assert isinstance(error, PeerLost)
        assert error.node == "stage-0"
        assert "killed by SIGKILL" in error.what
        go.set()


def test_silence_ends_a_run(scripted_peers: Any) -> None:
    """A peer that answers no more pings is lost while its data links are still open."""
    peers = scripted_peers(2)
    with brought_up(peers, grace=0.5) as pipeline:
        go = blocked(pipeline, peers, 1)
        agree = peers[0].answer
        peers[0].answer = lambda peer, message: (
            None if isinstance(message, Ping) else agree(peer, message)
        )
        error = answer_or_error(pipeline)
        assert isinstance(error, PeerLost)
        assert error.node == "stage-0"
        assert "has not answered" in error.what
        go.set()


def test_a_link_that_carries_nothing(scripted_peers: Any) -> None:
    """All peers answer, but a step comes nowhere: the link is named, and who waits for it."""
    peers = scripted_peers(2)
    with brought_up(peers, grace=0.2) as pipeline:
        go = blocked(pipeline, peers, 1)  # a step without work says nothing in beats
        error = answer_or_error(pipeline)
        assert isinstance(error, PeerLost)
        assert error.node == "stage-1"
        assert "nothing comes through the data link 1-engine" in error.what
        go.set()


def test_a_data_link_that_breaks(scripted_peers: Any) -> None:
    """Stages whose links close one after the other say so; the first to say it is named."""
    peers = scripted_peers(3)
    with brought_up(peers) as pipeline:
        go = blocked(pipeline, peers, 2)
        for stage, link in ((1, "the link 0-1"), (0, "the link 0-1"), (2, "the link 1-2")):
            pipeline.report(stage, Ended(stage, 0.0, None, None, f"{link} is closed."))
        pipeline._close_links("stage 0 has ended")
        error = answer_or_error(pipeline)
        assert isinstance(error, PeerLost)
        assert error.node == "stage-1"
        assert "the link 0-1 is closed" in error.what
        go.set()


def test_nothing_is_lost_after_the_end(scripted_peers: Any) -> None:
    """A peer that goes when all have been released is no failure."""
    peers = scripted_peers(2)
    with brought_up(peers) as pipeline:
        pipeline.start()
        pipeline.stop()
        peers[0].hang_up()
        while pipeline._coordinator.members[0].loss is None:
            pass
        assert pipeline.stop() is not None
        assert pipeline.reports.drain() == []


def test_a_peer_that_is_lost_before_the_start(scripted_peers: Any) -> None:
    """Between activation and loading, too, a loss has a name."""
    peers = scripted_peers(2)
    with brought_up(peers) as pipeline:
        peers[0].hang_up()
        while pipeline._coordinator.members[0].loss is None:
            pass
        with pytest.raises(PeerLost, match="stage-0"):
            pipeline.start()


def test_a_stage_that_hangs_at_the_end_is_given_up(scripted_peers: Any) -> None:
    """Stopping does not wait longer than the time-out for a stage that stays in its step."""
    peers = scripted_peers(2)
    with brought_up(peers, timeout=0.2) as pipeline:
        go = blocked(pipeline, peers, 0)
        pipeline.stop()
        for peer in peers:
            peer.wait_for(lambda peer=peer: peer.heard_a(Release))
        go.set()


def test_a_second_stop_hurries_the_first(scripted_peers: Any) -> None:
    """Whoever waits for the last step is let go when somebody gives it up."""
    peers = scripted_peers(2)
    with brought_up(peers) as pipeline:
        go = blocked(pipeline, peers, 0)
        patient = threading.Thread(target=pipeline.stop)
        patient.start()
        pipeline.stop(drain=False)
        patient.join(WAIT)
        assert not patient.is_alive()
        go.set()


def test_a_rank_that_the_others_miss(scripted_peers: Any) -> None:
    """Who loses a rank says which; that one is named, if nothing explains it within a moment."""
    peers = scripted_peers(3)
    with brought_up(peers) as pipeline:
        go = blocked(pipeline, peers, 2)
        words = "rank 0 of stage 1 is lost in the all-reduce"
        pipeline.report(0, Failed(0, WorkerFailed(0, "RankLost", words, lost=(1, 0))))
        error = answer_or_error(pipeline)
        assert isinstance(error, PeerLost)
        assert (error.node, error.address) == ("stage-1", str(peers[1].address))
        assert words in error.what
        go.set()


class Clocks:
    """A coordinator whose peers' clocks are ahead by so many seconds."""

    def __init__(self, *ahead: float) -> None:
        self.members: list[Any] = [object() for _ in ahead]
        self._ahead = ahead

    def offset(self, stage: int) -> float:
        return self._ahead[stage]


def missing(rank: int, broken: str = "") -> Failed:
    """A worker of stage 0 that misses ``rank``."""
    words = f"rank {rank} of stage 0 is lost"
    return Failed(0, WorkerFailed(0, "RankLost", words, lost=(0, rank), broken=broken))


class Members(Clocks):
    """A coordinator whose peers have nothing but names."""

    def __init__(self, count: int) -> None:
        super().__init__(*[0.0] * count)
        self.members = [
            Member(f"s0-r{rank}", Address(f"10.0.0.{rank}", 19000), None)  # type: ignore[arg-type]
            for rank in range(count)
        ]


def verdict(ranks: int, *reports: tuple[int, Report]) -> PeerLost:
    """Who is lost when one stage's peers have reported so, and nothing else comes."""
    pipeline = RemotePipeline(
        Members(ranks),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        ranks=ranks,
        grace=ENDLESS,
        credits=1,
        timeout=1.0,
    )
    for peer, report in reports:
        pipeline.report(peer, report)
    pipeline.tick(time.monotonic() + 60.0)
    assert pipeline._lost is not None
    return pipeline._lost


def test_a_connection_of_two_ranks_that_breaks() -> None:
    """Both nodes are named with their addresses, whoever told first of what follows from it."""
    error = verdict(
        3,
        (0, missing(1)),
        (1, missing(2, "Broken pipe")),
        (2, missing(1, "it has closed the connection")),
    )
    assert isinstance(error, PeerLinkBroken)
    ends = "the connection between s0-r1 @ 10.0.0.1:19000 and s0-r2 @ 10.0.0.2:19000 broke"
    assert str(error).startswith(f"{ends}, though both answer: Broken pipe. ")


@pytest.mark.parametrize(
    ("reports", "node"),
    [
        pytest.param([(0, missing(1)), (1, missing(0, "closed"))], "s0-r1", id="slow"),
        pytest.param([(1, missing(0, "closed")), (0, missing(1))], "s0-r1", id="slow, told first"),
        pytest.param(
            [(0, missing(1, "closed")), (1, Ended(0, 0.0, None, None, "a link is closed", 1))],
            "s0-r1",
            id="left for another reason",
        ),
    ],
)
def test_ranks_that_miss_one_for_another_reason(
    reports: list[tuple[int, Report]], node: str
) -> None:
    """The one that others miss is named as before."""
    error = verdict(2, *reports)
    assert (type(error), error.node) == (PeerLost, node)


def test_what_explains_a_missed_rank_is_told(scripted_peers: Any) -> None:
    """The supervisor's own words about its worker come before what the others saw of it."""
    peers = scripted_peers(2)
    with brought_up(peers) as pipeline:
        go = blocked(pipeline, peers, 1)
        pipeline.report(0, Failed(0, WorkerFailed(0, "RankLost", "missed", lost=(1, 0))))
        peers[1].say(Reported("s", Failed(1, RuntimeError("killed by SIGKILL"))))
        error = answer_or_error(pipeline)
        assert isinstance(error, PeerLost)
        assert error.node == "stage-1"
        assert "killed by SIGKILL" in error.what
        go.set()


def reported(ahead: Sequence[float], *reports: tuple[int, Report], ranks: int = 1) -> list[Report]:
    """What becomes of reports by peers with such clocks; beats first."""
    pipeline = RemotePipeline(
        Clocks(*ahead),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        ranks=ranks,
        grace=1.0,
        credits=1,
        timeout=1.0,
    )
    beats: list[Report] = []
    pipeline.reports.on_beat = beats.append
    for stage, report in reports:
        pipeline.report(stage, report)
    return [*beats, *pipeline.reports.drain()]


def test_hops_are_put_right_by_the_clocks_of_both_ends() -> None:
    """What a message took is the receiver's time less the sender's, both on one clock."""
    true_hop = 250.0
    ahead = (2.0, -3.0)
    measured = (true_hop + 2.0e6, true_hop + (-3.0 - 2.0) * 1e6)
    first, second = reported(
        ahead,
        (0, Beat(0, 1.0, 0.5, 1, hops=(measured[0],))),
        (1, Beat(1, 1.0, 0.5, 1, hops=(measured[1],))),
    )
    assert isinstance(first, Beat) and isinstance(second, Beat)
    assert [first.hops[0], second.hops[0]] == pytest.approx([true_hop, true_hop])


def test_times_of_work_are_put_on_one_clock() -> None:
    """First and last readings of all stages can be compared with each other."""
    first, idle = reported(
        (100.0, 0.0), (0, Ended(0, 1.5, 110.0, 120.0)), (1, Ended(1, 0, None, None))
    )
    assert first == Ended(0, 1.5, 10.0, 20.0)
    assert idle == Ended(1, 0, None, None)


def test_hops_in_a_mesh_come_from_equal_ranks() -> None:
    """The sender is the same rank of the stage before, so its clock counts."""
    true_hop, ahead = 250.0, (0.0, 2.0, 0.0, -3.0)
    report = Beat(1, 1.0, 0.5, 1, hops=(true_hop + (-3.0 - 2.0) * 1e6,), rank=1)
    [beat] = reported(ahead, (3, report), ranks=2)
    assert isinstance(beat, Beat)
    assert beat.hops[0] == pytest.approx(true_hop)
