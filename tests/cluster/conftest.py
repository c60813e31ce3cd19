"""Peers that answer as a test says, behind real gates."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import attrs
import pytest

from mlxcel.cluster.addresses import Address, parse_address
from mlxcel.cluster.control_channel import ControlChannel
from mlxcel.cluster.dial import dial
from mlxcel.cluster.gate import Gate
from mlxcel.cluster.handshake import Accept
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
    Pong,
    Reported,
    ToCoordinator,
    ToPeer,
)
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.session import Session
from mlxcel.pipeline.report import Report
from mlxcel.pipeline.socket_link import ConnectionInbox, ConnectionOutbox
from mlxcel.pipeline.worker import run_stage
from mlxcel.plugins import Plugins
from mlxcel.stage.contract import StageSpec
from mlxcel.testing.doubles import ScriptedExecutor, specs
from mlxcel.transport import TransportOptions
from mlxcel.transport.make import make_transport

SECRET = ClusterSecret(b"a secret of the tests")
WAIT = 20.0

Answer = Callable[["ScriptedPeer", ToPeer], "ToCoordinator | None"]
"""What a peer says to a message; None says nothing."""


def yes(peer: ScriptedPeer, message: ToPeer) -> ToCoordinator | None:
    """A peer that agrees to everything, and is alive."""
    match message:
        case Offer(session):
            return Accepted(session)
        case Commit(session):
            return Committed(session)
        case Activate(session):
            return Activated(session)
        case Ping(number):
            return Pong(number, time.monotonic() + peer.ahead, peer.silent)
    return None


class ScriptedPeer:
    """A peer in an event loop of its own thread; its stage is a :class:`ScriptedExecutor`.

    Attributes:
        answer: What it says to the coordinator's messages; a test may change it.
        ahead: Seconds that its clock is ahead.
        silent: What its pongs say of its worker.
        heard: All messages but pings, in order.
        executor: Made with the spec of the stage when all its links are there.
    """

    def __init__(self, **introduction: Any) -> None:
        fields: dict[str, Any] = {
            "node": "",
            "role": "peer",
            "cluster": "c",
            "versions": {"mlxcel": "1", "mlx-lm": "1"},
            "plugins": {},
            "families": ("none",),
        }
        self.introduction = Introduction(**{**fields, **introduction})
        self.answer: Answer = yes
        self.ahead = 0.0
        self.silent: float | None = None
        self.heard: list[ToPeer] = []
        self.changed = threading.Condition()
        self.executor: Callable[[StageSpec], ScriptedExecutor] = ScriptedExecutor
        self.channel: ControlChannel | None = None
        self.links: dict[str, Session] = {}
        self.offer: Offer | None = None
        self.paused = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.gate = Gate(
            SECRET, lambda: self.introduction, lambda dialer: Accept(), self._on_session
        )
        self.address = self.call(self.gate.listen(Address("127.0.0.1", 0)))
        self.introduction = attrs.evolve(self.introduction, node=str(self.address))

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of ``work`` in the peer's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT)

    def say(self, message: ToCoordinator) -> None:
        """Tell the coordinator, from any thread but the peer's."""
        self.wait_for(lambda: self.channel is not None)
        assert self.channel is not None
        self.call(self.channel.send(message, WAIT))

    def hang_up(self) -> None:
        """Close the control connection."""
        self.wait_for(lambda: self.channel is not None)

        async def close() -> None:
            assert self.channel is not None
            self.channel.close()

        self.call(close())

    def talk_nonsense(self) -> None:
        """Send what is no sealed frame."""
        self.wait_for(lambda: self.channel is not None)

        async def send() -> None:
            assert self.channel is not None
            await self._loop.sock_sendall(self.channel.session.sock, b"\x05\0\0\0" + 40 * b"x")

        self.call(send())

    def wait_for(self, wanted: Callable[[], bool]) -> None:
        """Until ``wanted``, which only what is heard can change."""
        with self.changed:
            assert self.changed.wait_for(wanted, WAIT), self.heard

    def heard_a(self, kind: type) -> bool:
        return any(isinstance(message, kind) for message in self.heard)

    def close(self) -> None:
        self.call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT)
        self._loop.close()

    async def _close(self) -> None:
        await self.gate.close()
        if self.channel is not None:
            self.channel.close()
        for session in self.links.values():
            session.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()  # the stage's thread

    async def _on_session(self, session: Session) -> None:
        if session.peer.purpose.kind == "data":
            self._linked(session.peer.purpose.link, session)
            return
        channel = ControlChannel(session)
        with self.changed:  # the coordinator may know of the connection before this peer does
            self.channel = channel
            self.changed.notify_all()
        with contextlib.suppress(Exception):
            while (message := await channel.receive(None)) is not None:
                if (answer := self.answer(self, message)) is not None:
                    await channel.send(answer, WAIT)
                if isinstance(message, Activate):
                    await self._activate()
                if isinstance(message, Offer):
                    self.offer = message
                with self.changed:
                    self.heard += [] if isinstance(message, Ping) else [message]
                    self.changed.notify_all()

    async def _activate(self) -> None:
        assert self.offer is not None
        for link, address in self.offer.dials.items():
            purpose = Purpose("data", self.offer.session, link, "pp_activation")
            ours = attrs.evolve(self.introduction, purpose=purpose)
            session = await dial(parse_address(address, link), SECRET, ours, WAIT)
            self._linked(link, session)

    def _linked(self, link: str, session: Session) -> None:
        self.links[link] = session
        if len(self.links) == 2:
            self._loop.run_in_executor(None, self._run_stage)

    def _run_stage(self) -> None:
        """Be the stage, as its worker would."""
        offer = self.offer
        assert offer is not None
        transport = make_transport(Plugins.discover(environ={}), "tcp", TransportOptions())
        receiving, sending = "", ""
        for link in self.links:
            sender = link.partition("-")[0]
            if sender == str(offer.stage):
                sending = link
            else:
                receiving = link
        ends = [
            transport.connection(
                self.links[link].take_socket(), self.links[link].keys, link, "pp_activation"
            )
            for link in (receiving, sending)
        ]

        def report(said: Report) -> None:
            with contextlib.suppress(Exception):
                self.say(Reported(offer.session, said))

        run_stage(
            specs(offer.stages)[offer.stage],
            self.executor,
            ConnectionInbox(ends[0], receiving, offer.credits + 1),
            ConnectionOutbox(ends[1], sending, WAIT, lambda value: value),
            report,
        )


class Peers(list[ScriptedPeer]):
    """Peers in the order of their stages."""

    @property
    def nodes(self) -> list[tuple[str, Address]]:
        """Their names in the cluster, and their addresses."""
        return [(f"stage-{stage}", peer.address) for stage, peer in enumerate(self)]

    def offers(self, session: str = "s") -> list[Offer]:
        """What each is offered: one layer of a model that does not exist."""
        addresses = [str(peer.address) for peer in self]
        return [
            Offer(
                session=session,
                node=f"stage-{stage}",
                family="none",
                stage=stage,
                stages=len(self),
                start=stage,
                stop=stage + 1,
                cast=None,
                dequantize=False,
                identity=ModelIdentity("0" * 64, (), len(self)),
                topology="",
                digest="",
                cluster="c",
                versions={},
                plugins={},
                bytes=1,
                transport="tcp",
                credits=8,
                timeout=WAIT,
                dials={f"{stage}-{stage + 1}": after for after in addresses[stage + 1 :][:1]},
            )
            for stage in range(len(self))
        ]


@pytest.fixture
def scripted_peers() -> Iterator[Callable[..., Peers]]:
    """Makes so many peers, sorted by their addresses' texts; fields go into all introductions."""
    peers: list[ScriptedPeer] = []

    def make(count: int, **introduction: Any) -> Peers:
        made = [ScriptedPeer(**introduction) for _ in range(count)]
        peers.extend(made)
        return Peers(sorted(made, key=lambda peer: str(peer.address)))

    yield make
    for peer in peers:
        peer.close()
