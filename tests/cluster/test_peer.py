"""A peer's supervisor over real connections, with a coordinator and workers from a script."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import attrs
import pytest
from aiohttp import web

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.announce import Announcement, announce
from mlxcel.cluster.control_channel import ControlChannel
from mlxcel.cluster.dial import dial
from mlxcel.cluster.gate import Gate
from mlxcel.cluster.handshake import Accept
from mlxcel.cluster.identity import Checkpoints, identify
from mlxcel.cluster.introduce import introduce
from mlxcel.cluster.introduction import Introduction, Purpose
from mlxcel.cluster.messages import (
    Accepted,
    Activate,
    Activated,
    Commit,
    Committed,
    Offer,
    Ping,
    Pong,
    Refused,
    Release,
    Reported,
    ToCoordinator,
)
from mlxcel.cluster.options import ClusterOptions
from mlxcel.cluster.peer import Peer
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.session import Session
from mlxcel.cluster.sockets import name_of
from mlxcel.cluster.topology import Node, NodeRole, Topology
from mlxcel.cluster.topology_toml import emit_topology
from mlxcel.errors import ListenError, MlxcelError, PeerRefused, WorkerStartError
from mlxcel.pipeline.control import DataSocket, Job
from mlxcel.pipeline.report import Ended, Failed, Hello, Loaded, Loading, Software
from mlxcel.plugins import Plugins
from mlxcel.server.peer_app import create_peer_app
from mlxcel.tensor.options import TensorParallel

Tiny = Callable[..., Path]

SECRET = ClusterSecret(b"a secret of the tests")
WAIT = 20.0
ENDLESS = 1000.0
"""A grace that no test waits for."""


class FakeWorker:
    """A worker that is armed at once and keeps what it is given."""

    pids = iter(range(1, 1000))

    def __init__(self, on_report: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self.pid = next(self.pids)
        self.how: str | None = None
        self.silent = 0.25
        self.job: Job | None = None
        self.sockets: dict[str, tuple[DataSocket, socket.socket]] = {}
        self.given = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.say = on_report
        self._on_end = on_end

    async def armed(self, timeout: float) -> Hello:
        return Hello(self.pid, Software({"BLAS": "wheel"}), "cpu", True)

    def give(self, job: Job, sockets: Iterable[tuple[DataSocket, socket.socket]]) -> None:
        self.job = job
        self.sockets = {data.direction: (data, sock) for data, sock in sockets}
        self.given.set()

    def die(self, how: str) -> None:
        self.how = how
        for _, sock in self.sockets.values():
            sock.close()
        self._on_end()

    async def end(self, grace: float) -> None:
        await self.may_end.wait()
        if self.how is None:
            self.die("exit code 1")


class Bench:
    """A peer under test, its workers, and what a coordinator needs to talk with it."""

    def __init__(self, folder: Path, out: Path, **options: Any) -> None:
        self.folder = folder
        self.out = out
        self.workers: list[FakeWorker] = []
        self.lines: list[str] = []
        self.cannot_start = ""
        self.plugins = Plugins.discover(environ={})
        fields: dict[str, Any] = {
            "mode": "peer-auto",
            "name": "c",
            "secret": SECRET,
            "control": Address("127.0.0.1", 0),
            "transport": None,
            "config_out": out,
            "heartbeat_grace": ENDLESS,
        }
        self.options = ClusterOptions(**{**fields, **options})
        self.peer: Peer
        self.ours = introduce(self.plugins, node="coordinator", role="coordinator", cluster="c")

    async def start_worker(self, *, on_report: Any, on_end: Any, **_: Any) -> Any:
        if self.cannot_start:
            raise WorkerStartError(0, self.cannot_start)
        self.workers.append(FakeWorker(on_report, on_end))
        return self.workers[-1]

    async def start(self) -> asyncio.Task[None]:
        self.peer = Peer(
            self.options,
            Checkpoints([self.folder]),
            self.plugins,
            environment={},
            say=self.lines.append,
            start_worker=self.start_worker,
        )
        task = asyncio.get_running_loop().create_task(self.peer.run())
        await until(lambda: self.peer.listening is not None or task.done())
        return task

    @property
    def address(self) -> Address:
        assert self.peer.listening is not None
        return self.peer.listening

    async def dial(self, purpose: Purpose | None = None, **changes: Any) -> Session:
        ours = attrs.evolve(self.ours, **changes)
        if purpose is not None:
            ours = attrs.evolve(ours, purpose=purpose)
        return await dial(self.address, SECRET, ours, WAIT)

    async def link(self, name: str, session: str = "s") -> Session:
        return await self.dial(Purpose("data", session, name, "pp_activation"))

    async def connect(self) -> Coordinator:
        return Coordinator(ControlChannel(await self.dial()))

    def offer(self, stage: int = 0, stages: int = 1, **changes: Any) -> Offer:
        """All layers for a single stage, else two of six."""
        identity = identify(self.folder)
        nodes = [
            Node(f"stage-{i}", Address("10.0.0.1", 19000 + i), "pipeline_stage", i)
            for i in range(stages)
        ]
        topology = Topology(
            (Node("coordinator", Address("10.0.0.1", 18999), "hybrid"), *nodes),
            name="c",
            pipeline_parallel_size=stages,
        )
        fields = {
            "session": "s",
            "node": f"stage-{stage}",
            "family": "llama",
            "stage": stage,
            "stages": stages,
            "start": 2 * stage,
            "stop": 2 * stage + 2 if stage < stages - 1 else identity.layers,
            "cast": "float32",
            "dequantize": True,
            "identity": identity,
            "topology": emit_topology(topology),
            "digest": "d",
            "cluster": "c",
            "versions": self.ours.versions,
            "plugins": {},
            "bytes": 1,
            "transport": "tcp",
            "credits": 4,
            "timeout": 60.0,
            "dials": {},
        }
        return Offer(**{**fields, **changes})


@attrs.define
class Coordinator:
    """The coordinator's end of a control connection."""

    channel: ControlChannel

    async def say(self, message: Any) -> None:
        await self.channel.send(message, WAIT)

    async def hear(self) -> Any:
        message = await self.channel.receive(WAIT)
        assert message is not None, "the peer has hung up"
        return message

    async def ask(self, message: Any) -> ToCoordinator:
        await self.say(message)
        answer: ToCoordinator = await self.hear()
        return answer

    async def bring_up(self, offer: Offer) -> None:
        assert await self.ask(offer) == Accepted(offer.session)
        assert await self.ask(Commit(offer.session)) == Committed(offer.session)
        assert await self.ask(Activate(offer.session)) == Activated(offer.session)

    async def failure(self) -> str:
        """The error of the next report, which must be one."""
        report = await self.hear()
        assert isinstance(report, Reported) and isinstance(report.report, Failed), report
        return str(report.report.error)


async def until(wanted: Callable[[], Any]) -> None:
    """Until ``wanted``, which only this event loop can change."""
    async with asyncio.timeout(WAIT):
        while not wanted():
            await asyncio.sleep(0.005)


Work = Callable[[Bench], Awaitable[None]]


@pytest.fixture
def run(tiny: Tiny, tmp_path: Path) -> Callable[..., None]:
    """Runs work beside a peer, whose end leaves nothing behind."""

    def run(work: Work, **options: Any) -> None:
        async def within() -> None:
            bench = Bench(tiny("llama"), tmp_path / "out" / "c.toml", **options)
            task = await bench.start()
            try:
                await work(bench)
            finally:
                task.cancel()
                await asyncio.wait([task])
            assert all(worker.how is not None for worker in bench.workers)
            assert len(asyncio.all_tasks()) == 1

        asyncio.run(within())

    return run


Run = Callable[..., None]


def test_a_single_stage_from_offer_to_release(run: Run) -> None:
    """The TOML is byte-equal to the offer's, and the worker gets its job and both links."""

    async def work(bench: Bench) -> None:
        coordinator, offer = await bench.connect(), bench.offer()
        await coordinator.bring_up(offer)
        assert bench.out.read_bytes() == offer.topology.encode()
        links = [await bench.link("engine-0"), await bench.link("0-engine")]
        [worker] = bench.workers
        await worker.given.wait()
        job = worker.job
        assert job is not None
        assert (job.spec.checkpoint, job.spec.family, job.credits) == (bench.folder, "llama", 4)
        assert (job.spec.start, job.spec.stop, job.spec.count) == (0, 6, 1)
        assert (job.spec.cast, job.spec.dequantize) == ("float32", True)
        for direction, session in zip(("receive", "send"), links, strict=True):
            data, sock = worker.sockets[direction]
            assert (data.transport, data.traffic) == ("tcp", "pp_activation")
            assert data.keys is not None
            assert (data.keys.send, data.keys.receive) == (
                session.keys.receive,
                session.keys.send,
            )
            assert sock.getpeername() == session.sock.getsockname()
        assert await coordinator.ask(Ping(7)) == Pong(7, pytest.approx(0, abs=1e9), 0.25)
        for report in (Loading(0, 1, 2), Loaded(0, 2, 0.5), Ended(0, 0.0, None, None)):
            worker.say(report)
            assert await coordinator.hear() == Reported("s", report)
        await coordinator.say(Release("s", "done"))
        await until(lambda: len(bench.workers) == 2)
        assert await coordinator.ask(Ping(8)) == Pong(8, pytest.approx(0, abs=1e9), None)
        said = "\n".join(bench.lines)
        for line in ("armed", "listening on", "accepted", "loading", "ready", "released: done"):
            assert line in said

    run(work)


def test_a_stage_dials_the_next_one(run: Run) -> None:
    """Stage 0 of 2 makes the link 0-1, sealed with the keys of its own handshake."""

    async def work(bench: Bench) -> None:
        sessions: asyncio.Queue[Session] = asyncio.Queue()
        neighbour = Introduction("n", "peer", "c", {}, {}, ())
        gate = Gate(SECRET, lambda: neighbour, lambda dialer: Accept(), sessions.put)
        following = await gate.listen(Address("127.0.0.1", 0))
        coordinator = await bench.connect()
        await coordinator.bring_up(bench.offer(0, 2, dials={"0-1": str(following)}))
        session = await sessions.get()
        assert session.peer.purpose == Purpose("data", "s", "0-1", "pp_activation")
        assert session.peer.role == "peer"
        await bench.link("engine-0")
        [worker] = bench.workers
        await worker.given.wait()
        keys = worker.sockets["send"][0].keys
        assert keys is not None and keys.send == session.keys.receive
        session.close()
        await gate.close()

    run(work)


def test_a_rank_dials_the_ranks_after_it(run: Run) -> None:
    """Its worker learns which rank it is, what it shares out, and who is at each connection."""

    async def work(bench: Bench) -> None:
        sessions: asyncio.Queue[Session] = asyncio.Queue()
        neighbour = Introduction("n", "peer", "c", {}, {}, ())
        gate = Gate(SECRET, lambda: neighbour, lambda dialer: Accept(), sessions.put)
        other = await gate.listen(Address("127.0.0.1", 0))
        tensor = TensorParallel(2, "within_expert")
        role: NodeRole = "pipeline_tensor_parallel"
        nodes = [Node(f"s0-r{i}", Address("10.0.0.1", 19000 + i), role, 0, i) for i in range(2)]
        offer = bench.offer(
            node="s0-r0",
            topology=emit_topology(Topology(tuple(nodes), "c", 1, 2)),
            tensor=tensor,
            dials={"s0r0-s0r1": str(other)},
            rank_timeout=7.0,
        )
        coordinator = await bench.connect()
        await coordinator.bring_up(offer)
        session = await sessions.get()
        assert session.peer.purpose == Purpose("data", "s", "s0r0-s0r1", "tp_collective")
        links = [await bench.link("engine-s0r0"), await bench.link("s0r0-engine")]
        [worker] = bench.workers
        await worker.given.wait()
        assert worker.job is not None
        assert (worker.job.spec.rank, worker.job.spec.tensor) == (0, tensor)
        assert (worker.job.rank_timeout, worker.job.collectives) == (7.0, "transport")
        data = worker.sockets["group"][0]
        assert (data.rank, data.traffic) == (1, "tp_collective")
        assert set(worker.sockets) == {"receive", "send", "group"}
        for made in (*links, session):
            made.close()
        await gate.close()

    run(work)


def test_a_next_stage_that_is_not_there_is_reported(run: Run) -> None:
    """The failure names the address; the coordinator releases, and the worker was never used."""

    async def work(bench: Bench) -> None:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            gone = name_of(nobody.getsockname())
        coordinator = await bench.connect()
        await coordinator.bring_up(bench.offer(0, 2, dials={"0-1": gone}))
        assert gone in await coordinator.failure()
        await coordinator.say(Release("s", "it failed"))
        assert await coordinator.ask(bench.offer()) == Accepted("s")
        assert len(bench.workers) == 1

    run(work)


def test_a_refused_offer_leaves_the_peer_ready(run: Run) -> None:
    """The reason is typed, and the same peer accepts the next offer."""

    async def work(bench: Bench) -> None:
        coordinator = await bench.connect()
        refused = await coordinator.ask(bench.offer(bytes=1 << 60))
        assert isinstance(refused, Refused) and refused.reason == "memory"
        assert f"needs {1 << 60} bytes" in refused.text
        assert await coordinator.ask(bench.offer(session="t")) == Accepted("t")
        assert not bench.out.exists()  # nothing was started

    run(work)


def test_a_coordinator_that_goes_is_served_again(run: Run) -> None:
    """Its end releases the stage; it, or another, can come back at once."""

    async def work(bench: Bench) -> None:
        for count in (1, 2, 3):
            coordinator = await bench.connect()
            await coordinator.bring_up(bench.offer(session=f"s{count}"))
            links = [await bench.link(name, f"s{count}") for name in ("engine-0", "0-engine")]
            await until(lambda: bench.workers[-1].given.is_set())
            assert len(bench.workers) == count
            coordinator.channel.close()
            await until(lambda: bench.peer.state.state == "waiting")
            for link in links:
                link.close()
        assert bench.peer.state.sessions == 3

    run(work)


def test_a_second_coordinator_is_told_who_was_first(run: Run) -> None:
    """The first keeps its session."""

    async def work(bench: Bench) -> None:
        first = await bench.connect()
        assert await first.ask(bench.offer()) == Accepted("s")
        ours = name_of(first.channel.session.sock.getsockname())
        with pytest.raises(PeerRefused, match=f"busy with the session of {ours}"):
            await bench.connect()
        assert await first.ask(Commit("s")) == Committed("s")

    run(work)


@pytest.mark.parametrize(
    ("link", "session", "told"),
    [("engine-0", "x", "no session of that name"), ("0-1", "s", "waits for no link '0-1'")],
)
def test_links_that_nobody_waits_for_are_refused(
    run: Run, link: str, session: str, told: str
) -> None:
    """A data connection names its session and its place in it."""

    async def work(bench: Bench) -> None:
        coordinator = await bench.connect()
        await coordinator.ask(bench.offer())
        with pytest.raises(PeerRefused, match=told):
            await bench.link(link, session)

    run(work)


def test_another_cluster_is_refused(run: Run) -> None:
    """Two clusters with one secret do not take each other's peers."""

    async def work(bench: Bench) -> None:
        with pytest.raises(PeerRefused, match="belongs to the cluster 'c', not 'other'"):
            await bench.dial(cluster="other")
        assert bench.peer.state.state == "waiting"

    run(work)


def test_a_dead_worker_is_reported_and_replaced(run: Run) -> None:
    """The coordinator learns process and signal; after the release the peer is whole again."""

    async def work(bench: Bench) -> None:
        coordinator = await bench.connect()
        await coordinator.bring_up(bench.offer())
        links = [await bench.link("engine-0"), await bench.link("0-engine")]
        worker = bench.workers[0]
        await worker.given.wait()
        worker.die("killed by SIGKILL")
        failure = await coordinator.failure()
        assert f"its worker process {worker.pid} died: killed by SIGKILL" in failure
        await coordinator.say(Release("s", "stage 0 is lost"))
        for link in links:
            link.close()
        await coordinator.bring_up(bench.offer(session="t"))
        assert len(bench.workers) == 2

    run(work)


def test_a_silent_coordinator_is_left(run: Run) -> None:
    """One whose connection stays open and who says nothing loses the peer after the grace."""

    async def work(bench: Bench) -> None:
        coordinator = await bench.connect()
        assert await coordinator.ask(bench.offer()) == Accepted("s")
        assert await coordinator.channel.receive(WAIT) is None
        assert "no sign of life" in bench.lines[-1]
        assert bench.peer.state.state == "waiting"

    run(work, heartbeat_grace=0.4)


def test_a_toml_that_cannot_be_written_is_refused(run: Run) -> None:
    """The cause reaches the coordinator instead of an activation."""

    async def work(bench: Bench) -> None:
        bench.out.parent.write_text("a file where the folder should be")
        coordinator, offer = await bench.connect(), bench.offer()
        await coordinator.ask(offer)
        await coordinator.ask(Commit("s"))
        refused = await coordinator.ask(Activate("s"))
        assert isinstance(refused, Refused) and refused.reason == "config"
        assert "--cluster-config-out" in refused.text

    run(work)


def test_a_peer_whose_worker_does_not_start_refuses(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why, soon enough for the coordinator, and takes the next offer when it has one."""
    monkeypatch.setattr("mlxcel.cluster.armory.READY_SECONDS", 0.05)

    async def work(bench: Bench) -> None:
        coordinator = await bench.connect()
        bench.cannot_start = "killed by SIGKILL"
        bench.workers[0].die("exit code 1")
        refused = await coordinator.ask(bench.offer())
        assert isinstance(refused, Refused) and refused.reason == "worker"
        assert "has ended: killed by SIGKILL" in refused.text
        bench.cannot_start = ""
        await until(lambda: len(bench.workers) == 2)
        assert await coordinator.ask(bench.offer(session="t")) == Accepted("t")

    run(work)


def test_a_worker_that_is_gone_when_it_is_needed_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator does not wait until its own patience is over."""
    monkeypatch.setattr("mlxcel.cluster.armory.READY_SECONDS", 0.05)

    async def work(bench: Bench) -> None:
        coordinator = await bench.connect()
        await coordinator.bring_up(bench.offer())
        bench.cannot_start = "killed by SIGKILL"
        bench.workers[0].die("exit code 1")
        links = [await bench.link("engine-0"), await bench.link("0-engine")]
        assert "has ended: killed by SIGKILL" in await coordinator.failure()
        await coordinator.say(Release("s", "stage 0 is lost"))
        for link in links:
            link.close()

    run(work)


def test_what_the_last_worker_is_about_to_give_back_is_free(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that comes back at once does not plan with what its last session held."""
    memory = 8 << 30
    monkeypatch.setattr("mlxcel.cluster.peer.available_memory", lambda: memory)

    async def work(bench: Bench) -> None:
        nonlocal memory
        coordinator = await bench.connect()
        await coordinator.bring_up(bench.offer())
        links = [await bench.link("engine-0"), await bench.link("0-engine")]
        worker = bench.workers[0]
        await worker.given.wait()
        memory, before = 1 << 30, memory
        worker.may_end.clear()
        coordinator.channel.close()
        await until(lambda: bench.peer.state.state == "waiting")
        again = await bench.dial()
        assert again.peer.memory == before
        again.close()
        worker.may_end.set()
        await until(lambda: len(bench.workers) == 2 and bench.peer.state.state == "waiting")
        later = await bench.dial()
        assert later.peer.memory == memory
        for made in (*links, later):
            made.close()

    run(work)


def test_what_a_peer_says_of_itself(run: Run) -> None:
    """Where it listens, what its worker runs with, and how much memory is free now."""

    async def work(bench: Bench) -> None:
        session = await bench.dial()
        peer = session.peer
        assert (peer.node, peer.role, peer.cluster) == (str(bench.address), "peer", "c")
        assert (peer.device, peer.fast_blas, peer.versions["BLAS"]) == ("cpu", True, "wheel")
        assert "llama" in peer.families
        assert peer.memory > 0
        session.close()

    run(work)


def test_an_address_in_use_ends_the_peer(tiny: Tiny, tmp_path: Path) -> None:
    """With the error, and without its worker."""

    async def within() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            control = Address("127.0.0.1", taken.getsockname()[1])
            bench = Bench(tiny("llama"), tmp_path / "c.toml", control=control)
            task = await bench.start()
            with pytest.raises(ListenError, match="--cluster-control-addr"):
                await task
        assert [worker.how for worker in bench.workers] == ["exit code 1"]

    asyncio.run(within())


def test_a_peer_that_cannot_replace_its_worker_ends(tiny: Tiny, tmp_path: Path) -> None:
    """What breaks the search for a worker is a bug, which is told at once and not by refusals."""

    async def within() -> None:
        bench = Bench(tiny("llama"), tmp_path / "c.toml")
        task = await bench.start()

        async def breaks(**_: Any) -> None:
            raise LookupError("no such thing")

        bench.peer._armory._start = breaks  # type: ignore[assignment]
        bench.workers[0].die("exit code 1")
        with pytest.raises(LookupError, match="no such thing"):
            await asyncio.wait_for(task, WAIT)

    asyncio.run(within())


def test_unwanted_beacons_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time it is asked anew whether one is wanted."""
    sent: list[Any] = []
    monkeypatch.setattr("mlxcel.cluster.announce.send_beacon", sent.append)
    monkeypatch.setattr("mlxcel.cluster.announce.INTERVAL", 0)
    asked: list[int] = []
    announcement = Announcement(SECRET, "c", Address("0.0.0.0", 1), "127.0.0.1", 1)

    def wanted() -> bool:
        asked.append(len(sent))
        if len(asked) == 5:
            raise KeyError("enough")
        return len(asked) % 2 == 0

    with pytest.raises(KeyError, match="enough"):
        asyncio.run(announce(announcement, wanted))
    assert asked == [0, 0, 1, 1, 2]


def test_beacons_are_sent_while_there_is_no_coordinator(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are sent until one has come, and again after it has gone."""
    sent: list[Any] = []
    monkeypatch.setattr("mlxcel.cluster.announce.send_beacon", sent.append)
    monkeypatch.setattr("mlxcel.cluster.announce.INTERVAL", 0.01)

    async def work(bench: Bench) -> None:
        await until(lambda: sent)
        assert sent[0].listening == bench.address
        coordinator = await bench.connect()
        assert await coordinator.ask(Ping(1))
        sent.clear()
        coordinator.channel.close()
        await until(lambda: len(sent) > 2)

    run(work, discovery="mdns")


def test_health_and_metrics_tell_the_state(run: Run) -> None:
    """An operator sees which stage the peer is, for whom, and who was turned away."""

    async def work(bench: Bench) -> None:
        runner = web.AppRunner(create_peer_app(bench.peer))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]

        async def get(path: str) -> Any:
            async with aiohttp.ClientSession() as client:
                answer = await client.get(f"http://127.0.0.1:{port}{path}")
                assert answer.status == 200
                return await (answer.json() if path == "/health" else answer.text())

        assert (await get("/health"))["status"] == "waiting"
        coordinator = await bench.connect()
        await coordinator.bring_up(bench.offer())
        health = await get("/health")
        assert (health["status"], health["node"], health["stage"]) == ("starting", "stage-0", 0)
        assert health["layers"] == "0-5"
        with pytest.raises(PeerRefused):
            await bench.connect()
        metrics = (await get("/metrics")).splitlines()
        assert 'mlxcel_cluster_handshakes_total{outcome="accepted"} 1.0' in metrics
        assert 'mlxcel_cluster_handshakes_total{outcome="refused"} 1.0' in metrics
        assert "mlxcel_peer_sessions_total 1.0" in metrics
        assert "mlxcel_peer_stage 0.0" in metrics
        await runner.cleanup()

    run(work)


def test_two_coordinators_at_the_same_moment(run: Run) -> None:
    """Only one gets the peer; the other is refused or hung up on, and may come again."""

    async def work(bench: Bench) -> None:
        dialled = await asyncio.gather(bench.dial(), bench.dial(), return_exceptions=True)
        channels = [ControlChannel(s) for s in dialled if isinstance(s, Session)]
        answers = 0
        for channel in channels:
            with contextlib.suppress(MlxcelError):
                await channel.send(Ping(1), WAIT)
                answers += await channel.receive(WAIT) is not None
        assert answers == 1

    run(work)
