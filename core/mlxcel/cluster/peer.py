"""A peer's supervisor: its gate, its armed worker, and the session that it is in.

Everything runs in one event loop and touches no MLX; what takes long is the worker's business, or
happens on a thread. What to do next is decided by :class:`mlxcel.cluster.peer_state.PeerState`;
here it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import attrs

from mlxcel.checkpoint.weights_mode import available_memory
from mlxcel.cluster.addresses import Address, parse_address
from mlxcel.cluster.announce import Announcement, announce
from mlxcel.cluster.armory import Armory, StartWorker
from mlxcel.cluster.control_channel import ControlChannel
from mlxcel.cluster.dial import dial
from mlxcel.cluster.fabric import fabric_address
from mlxcel.cluster.gate import Gate
from mlxcel.cluster.handshake import Accept
from mlxcel.cluster.heartbeat import ping_seconds
from mlxcel.cluster.identity import Checkpoints
from mlxcel.cluster.introduce import introduce
from mlxcel.cluster.introduction import Introduction, Purpose
from mlxcel.cluster.links import Link
from mlxcel.cluster.messages import Offer, Ping, Pong, Refused, ToCoordinator, ToPeer
from mlxcel.cluster.offers import OwnPlan, Standing, judge_offer
from mlxcel.cluster.options import ClusterOptions
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
from mlxcel.cluster.session import Session
from mlxcel.cluster.sockets import hang_up
from mlxcel.cluster.topology_toml import parse_topology, write_topology
from mlxcel.cluster.worker_process import FromStage, WorkerProcess
from mlxcel.errors import ChannelClosed, MlxcelError, PeerWorkerDied
from mlxcel.pipeline.control import DataSocket, Job
from mlxcel.plugins import Plugins
from mlxcel.stage.contract import StageSpec
from mlxcel.transport.contract import TrafficClass, TransportOptions
from mlxcel.transport.spin import spin_for

SEND_SECONDS = 5.0
"""How long the coordinator may take to accept a message of a few kilobytes."""

DIAL_SECONDS = 10.0
"""How long a link to another peer may take to be made."""


class Peer:
    """See the module. Make it in the event loop that runs it.

    Args:
        options: What the operator says of the cluster.
        checkpoints: What it can take part with.
        plugins: Its plugins.
        environment: What its workers have in their environment beyond this process's.
        own_plan: On the manual path, what it knows beforehand.
        say: Takes lines for the operator.
        start_worker: For tests.

    Attributes:
        state: Where it is.
        gate: Its listening socket, with its counters.
        listening: Where that is, once it is.
    """

    def __init__(
        self,
        options: ClusterOptions,
        checkpoints: Checkpoints,
        plugins: Plugins,
        *,
        environment: Mapping[str, str],
        own_plan: OwnPlan | None = None,
        say: Callable[[str], None] = lambda line: None,
        start_worker: StartWorker = WorkerProcess.start,
    ) -> None:
        assert options.secret is not None and options.control is not None, "of every peer"
        self.state = PeerState(options.name, options.heartbeat_grace, time.monotonic())
        self.gate = Gate(options.secret, self._introduce, self.state.verdict, self._welcome)
        self.listening: Address | None = None
        self._secret = options.secret
        self._control = options.control
        self._options = options
        self._checkpoints = checkpoints
        self._plugins = plugins
        self._own_plan = own_plan
        self._say = say
        self._armory = Armory(
            environment=environment,
            without=plugins.without,
            on_report=self._hear,
            on_death=self._mourn,
            say=say,
            start=start_worker,
        )
        self._channel: ControlChannel | None = None
        self._memory = 0  # what was free when the last offer was judged
        self._links: dict[str, tuple[DataSocket, socket.socket]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._session_tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve coordinators, one after the other, until cancelled.

        Raises:
            MlxcelError: It cannot listen, or no worker can be started.
        """
        try:
            await self._armory.open()
            self._spawn(self._armory.keep())
            self.listening = await self.gate.listen(self._control)
            self._say(f"listening on {self.listening} in the cluster {self._options.name!r}")
            if self.gate.doubt:
                self._say(f"mlxcel: warning: {self.gate.doubt}")
            self._spawn(self._tick())
            if self._options.discovery == "mdns":
                self._spawn(self._announce(self.listening))
            await self._broken
        finally:
            await self._close()

    async def _close(self) -> None:
        await self.gate.close()
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
        self._close_links()
        await self._armory.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        """A task that breaks is a bug, which must not hide."""
        self._tasks.discard(task)
        self._session_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._broken.done():
            self._broken.set_exception(error)

    # What it says of itself.

    def _introduce(self, purpose: Purpose | None = None) -> Introduction:
        hello = self._armory.hello
        assert hello is not None, "the gate opens after that"
        free = min((n for n in (available_memory(), hello.memory) if n), default=0)
        if not self._armory.free:
            free = max(free, self._memory)  # what the last session's worker is about to give back
        own = introduce(
            self._plugins,
            node=str(self.listening or self._control),
            role="peer",
            cluster=self._options.name,
            memory=free,
            device=hello.device,
            fast_blas=hello.fast_blas,
            blas=hello.software.versions.get("BLAS"),
        )
        return own if purpose is None else attrs.evolve(own, purpose=purpose)

    async def _announce(self, listening: Address) -> None:
        options = self._options
        await announce(
            Announcement(
                self._secret,
                options.name,
                listening,
                options.discovery_target,
                options.discovery_port,
            ),
            lambda: not self.state.coordinator,
        )

    # What happens.

    async def _welcome(self, session: Session) -> None:
        """A connection has passed the gate."""
        # Two may have passed it before either was here: the second one has to go.
        if not isinstance(self.state.verdict(session.peer), Accept):
            session.close()
        elif session.peer.purpose.kind == "data":
            assert self.state.offer is not None, "links are made within sessions"
            links = {link.name: link for link in self.state.offer.links}
            self._add_link(links[session.peer.purpose.link], session)
        else:
            self._channel = ControlChannel(session)
            self._do(self.state.connected(session.address, time.monotonic()))
            self._spawn(self._converse(self._channel))

    async def _converse(self, channel: ControlChannel) -> None:
        """Hear the coordinator until its control connection ends."""
        why = "it has closed the connection"
        try:
            while (message := await channel.receive(None)) is not None:
                assert isinstance(message, ToPeer), "a channel takes nothing else here"
                if isinstance(message, Ping):
                    self._send(Pong(message.number, time.monotonic(), self._armory.silent))
                self._do(self.state.receive(message, time.monotonic()))
        except ChannelClosed:
            why = "its connection broke"
        except MlxcelError as error:
            why = str(error)
        channel.close()
        if channel is self._channel:
            self._channel = None
            self._do(self.state.lost(why))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(ping_seconds(self._options.heartbeat_grace))
            self._do(self.state.tick(time.monotonic()))

    def _hear(self, report: FromStage) -> None:
        self._do(self.state.reported(report))

    def _mourn(self, pid: int, how: str) -> None:
        self._do(self.state.failed(PeerWorkerDied(pid, how)))

    # What is done.

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Log(text):
                    self._say(text)
                case Send(message):
                    self._send(message)
                case Judge(offer):
                    self._spawn_in_session(self._judge(offer))
                case Start(offer):
                    self._spawn_in_session(self._start(offer))
                case Run(offer, folder, fabric):
                    self._spawn_in_session(self._run(offer, folder, fabric))
                case Abandon():
                    self._abandon()
                case HangUp():
                    if self._channel is not None:
                        self._channel.close()

    def _send(self, message: ToCoordinator) -> None:
        if self._channel is not None:
            self._spawn(_deliver(self._channel, message))

    def _spawn_in_session(self, work: Coroutine[Any, Any, None]) -> None:
        self._session_tasks.add(self._spawn(work))

    def _abandon(self) -> None:
        for task in self._session_tasks - {asyncio.current_task()}:
            task.cancel()
        self._close_links()
        self._armory.give_back()

    async def _judge(self, offer: Offer) -> None:
        verdict, fabric = await self._verdict(offer), ""
        if not isinstance(verdict, Refused):
            try:
                fabric = await asyncio.to_thread(fabric_address, offer)
            except MlxcelError as error:
                verdict = Refused(offer.session, "transport", str(error))
        self._do(self.state.judged(offer, verdict, time.monotonic(), fabric))

    async def _verdict(self, offer: Offer) -> Path | Refused:
        try:
            await self._armory.ready()  # what the last session held does not count against this one
        except MlxcelError as error:
            return Refused(offer.session, "worker", str(error))
        introduction = self._introduce()
        self._memory = introduction.memory
        standing = Standing(
            introduction,
            self._plugins,
            self._checkpoints,
            self._options.transport,
            self._own_plan,
        )
        return await asyncio.to_thread(judge_offer, offer, standing)

    async def _start(self, offer: Offer) -> None:
        problem = None
        if self._own_plan is None:
            try:
                path = self._options.config_path(offer.node)
                await asyncio.to_thread(write_topology, path, offer.topology)
            except MlxcelError as error:
                problem = str(error)
        self._do(self.state.written(offer, problem))
        if problem is None:
            links = [link for link in offer.links if link.to is not None]
            await asyncio.gather(*(self._dial(offer, link) for link in links))

    async def _dial(self, offer: Offer, link: Link) -> None:
        """Make the link to the next stage's peer, or to another rank of this stage."""
        purpose = Purpose("data", offer.session, link.name, link.traffic)
        try:
            address = parse_address(offer.dials[link.name], f"the link {link.name}")
            session = await dial(address, self._secret, self._introduce(purpose), DIAL_SECONDS)
        except MlxcelError as error:
            self._do(self.state.failed(error))
        else:
            self._add_link(link, session)

    def _add_link(self, link: Link, session: Session) -> None:
        offer = self.state.offer
        assert offer is not None, "links are made within sessions"
        data = DataSocket(
            link.direction,
            f"the link {link.name}",
            f"{session.peer.role} {session.address}",
            offer.transport,
            session.keys,
            link.traffic,
            _options(offer, link.traffic),
            link.rank,
        )
        self._links[link.name] = (data, session.take_socket())
        self._do(self.state.linked(link.name))

    async def _run(self, offer: Offer, folder: Path, fabric: tuple[str, ...]) -> None:
        spec = StageSpec(
            folder,
            offer.family,
            offer.stage,
            offer.stages,
            offer.start,
            offer.stop,
            offer.cast,
            offer.dequantize,
            offer.tensor,
            offer.rank if offer.tensor.size > 1 else None,
        )
        job = Job(spec, offer.credits, offer.timeout, offer.rank_timeout, offer.collectives, fabric)
        try:
            worker = await self._armory.take()
            links, self._links = self._links, {}
            worker.give(job, links.values())
        except MlxcelError as error:
            self._do(self.state.failed(error))

    def _close_links(self) -> None:
        links, self._links = self._links, {}
        for _, sock in links.values():
            hang_up(sock)


async def _deliver(channel: ControlChannel, message: ToCoordinator) -> None:
    # A coordinator that takes nothing is noticed by whoever hears it: the channel closes.
    with contextlib.suppress(MlxcelError):
        await channel.send(message, SEND_SECONDS)


def _options(offer: Offer, traffic: TrafficClass) -> TransportOptions:
    spin = spin_for(_stages_here(offer), traffic=traffic)
    if traffic == "tp_collective":
        return TransportOptions(spin=spin, stall=offer.rank_timeout)
    return TransportOptions(spin=spin)


def _stages_here(offer: Offer) -> int:
    """How many workers of the cluster run on this machine, as far as its TOML shows."""
    topology = parse_topology(offer.topology, "the offered TOML")
    own = topology.node(offer.node)
    return sum(
        own is not None and node.address.host == own.address.host for node in topology.stages
    )
