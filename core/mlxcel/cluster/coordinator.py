"""The coordinator's control plane: its connections to all peers, in a thread of its own.

An event loop there sends pings, hears what peers say, and notices who is lost, so that no load
on the HTTP side or in the engine can delay it. Everybody else uses the blocking methods here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import attrs

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.bring_up import BringUp, Send
from mlxcel.cluster.control_channel import ControlChannel
from mlxcel.cluster.dial import dial
from mlxcel.cluster.handshake import check_introduction
from mlxcel.cluster.heartbeat import FailureDetector, Loss, ping_seconds
from mlxcel.cluster.introduction import Introduction, Purpose
from mlxcel.cluster.messages import Offer, Ping, Pong, Release, Reported, ToCoordinator, ToPeer
from mlxcel.cluster.muster import muster
from mlxcel.cluster.peer_clock import PeerClock
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.session import Session
from mlxcel.errors import MlxcelError, PeerLost
from mlxcel.pipeline.report import Report

_log = logging.getLogger(__name__)

T = TypeVar("T")

SEND_SECONDS = 5.0
"""How long a peer may take to accept a message of a few kilobytes."""

CLOSE_SECONDS = 2.0
"""How long saying goodbye may take."""

Dial = Callable[[Address, ClusterSecret, Introduction, float], Awaitable[Session]]


class Listener(Protocol):
    """Whoever runs the stages; all calls come from the control plane's thread."""

    def report(self, peer: int, report: Report) -> None:
        """The worker of a peer, by its place in the order of the members, says something."""

    def lost(self, peer: int, error: PeerLost) -> None:
        """A peer is lost; said once for each."""

    def tick(self, now: float) -> None:
        """Some time has passed; ``now`` is :func:`time.monotonic`."""


@attrs.define(eq=False)
class Member:
    """A peer of the cluster, and the node that it is to be."""

    node: str
    address: Address
    channel: ControlChannel
    clock: PeerClock = attrs.field(factory=PeerClock)
    pings: dict[int, float] = attrs.field(factory=dict)
    loss: PeerLost | None = None

    @property
    def introduction(self) -> Introduction:
        """What the peer says of itself, but where it is: it may listen on all of its addresses,
        and not know by which one it is reached."""
        return attrs.evolve(self.channel.session.peer, node=str(self.address))


class Coordinator:
    """See the module. A context manager: at its end all peers are released and left.

    Args:
        secret: Of the cluster.
        introduction: What to say of this node.
        grace: Seconds of silence after which a peer or its worker counts as lost.
        dial: For tests.

    Attributes:
        members: The peers, stage after stage, and in each its ranks.
    """

    def __init__(
        self,
        secret: ClusterSecret,
        introduction: Introduction,
        *,
        grace: float,
        dial: Dial = dial,
    ) -> None:
        self.members: tuple[Member, ...] = ()
        self._secret = secret
        self._introduction = introduction
        self._grace = grace
        self._dial = dial
        self._listener: Listener | None = None
        self._early: list[tuple[int, Report]] = []  # said before anybody listened
        self._detector = FailureDetector(0, grace, 0.0)
        self._bring_up: BringUp | None = None
        self._moved = asyncio.Event()
        self._session = ""
        self._places: tuple[tuple[int, int], ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="mlxcel-control-plane", daemon=True
        )

    def __enter__(self) -> Coordinator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(MlxcelError):
            self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # What the other threads ask for.

    def connect(
        self,
        peers: Sequence[tuple[str, Address]],
        timeout: float,
        *,
        patience: float = 0.0,
        on_waiting: Callable[[Address], None] = lambda address: None,
    ) -> tuple[Introduction, ...]:
        """Connect to all peers side by side.

        Args:
            peers: The node's name and the address of each, by place.
            timeout: Seconds that one attempt may take.
            patience, on_waiting: See :func:`mlxcel.cluster.muster.muster`.

        Returns:
            What each says of itself.

        Raises:
            BringUpError: Some could not be reached, or refuse; the error lists all of them.
            TooMuchToSay: The introduction of this node is too large for any of them.
        """
        check_introduction(self._introduction)
        self._wait(self._connect(peers, timeout, patience, on_waiting))
        return tuple(member.introduction for member in self.members)

    def bring_up(self, offers: Sequence[Offer], patience: float) -> dict[str, float]:
        """Offer, commit and activate; when it returns, all peers are starting their stages.

        Args:
            offers: One for each peer, by place.
            patience: Seconds that the peers may take to answer each question.

        Returns:
            The seconds that each question took.

        Raises:
            BringUpError: Not all said yes to everything; all have been released.
        """
        return self._wait(self._ask(offers, patience))

    def open_link(self, peer: int, link: str, timeout: float) -> Session:
        """A connection for data to a peer, for the link named ``link``.

        Raises:
            DialError, DeadlineError: The peer could not be reached, or refuses.
        """
        purpose = Purpose("data", self._session, link, "pp_activation")
        introduction = attrs.evolve(self._introduction, purpose=purpose)
        address = self.members[peer].address
        return self._wait(self._dialled(address, introduction, timeout))

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` from now on what the peers say, and who is lost already."""
        self._loop.call_soon_threadsafe(self._listen, listener)

    def release(self, reason: str) -> None:
        """Let all peers go: they end their stages and are ready for another bring-up."""
        with contextlib.suppress(MlxcelError):
            self._wait(self._release(reason))

    def offset(self, peer: int) -> float:
        """Seconds that the clock of a peer is ahead of ours."""
        return self.members[peer].clock.offset

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work`` in the control plane's thread; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # All below runs in the control plane's thread.

    async def _connect(
        self,
        peers: Sequence[tuple[str, Address]],
        timeout: float,
        patience: float,
        on_waiting: Callable[[Address], None],
    ) -> None:
        channels: dict[Session, ControlChannel] = {}
        complete = asyncio.Event()

        async def dialled(address: Address) -> Session:
            session = await self._dialled(address, self._introduction, timeout)
            channels[session] = channel = ControlChannel(session)
            self._start(self._keep(channel, complete))
            return session

        try:
            sessions = await muster(peers, dialled, patience=patience, on_waiting=on_waiting)
        except BaseException:
            for channel in channels.values():
                channel.close()
            raise
        finally:
            complete.set()
        self.members = tuple(
            Member(name, address, channels[session])
            for (name, address), session in zip(peers, sessions, strict=True)
        )
        self._detector = FailureDetector(len(peers), self._grace, time.monotonic())
        for peer in range(len(peers)):
            self._start(self._hear(peer))
            self._start(self._ping(peer))
        self._start(self._watch())

    async def _dialled(
        self, address: Address, introduction: Introduction, timeout: float
    ) -> Session:
        return await self._dial(address, self._secret, introduction, timeout)

    async def _keep(self, channel: ControlChannel, complete: asyncio.Event) -> None:
        """Ping a peer that is there until all others are, so that it does not give up waiting.

        What it answers is read when it is a member.
        """
        with contextlib.suppress(MlxcelError):
            while not complete.is_set():
                await channel.send(Ping(0), SEND_SECONDS)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(complete.wait(), ping_seconds(self._grace))

    async def _ask(self, offers: Sequence[Offer], patience: float) -> dict[str, float]:
        addresses = [str(member.address) for member in self.members]
        asking = self._bring_up = BringUp(offers, addresses, patience)
        self._session = offers[0].session
        self._places = tuple(offer.place for offer in offers)
        self._early.clear()
        self._send_all(asking.begin(time.monotonic()))
        for peer, member in enumerate(self.members):
            if member.loss is not None:
                self._send_all(asking.lose(peer, member.loss.what, time.monotonic()))
        while not asking.over:
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                left = asking.deadline - time.monotonic()
                await asyncio.wait_for(self._moved.wait(), max(0.0, left))
            asking.tick(time.monotonic())
        if asking.error is not None:
            await self._release("the cluster did not come up")
            raise asking.error
        return asking.seconds

    def _listen(self, listener: Listener) -> None:
        self._listener = listener
        early, self._early = self._early, []
        for peer, report in early:
            listener.report(peer, report)
        for peer, member in enumerate(self.members):
            if member.loss is not None:
                listener.lost(peer, member.loss)

    async def _release(self, reason: str) -> None:
        session, self._session = self._session, ""
        if not session:
            return
        message = Release(session, reason)
        await asyncio.gather(
            *(self._send(member, message) for member in self.members if member.loss is None)
        )

    async def _close(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._release("the coordinator has ended"), CLOSE_SECONDS)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for member in self.members:
            member.channel.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send_all(self, sends: Iterable[Send]) -> None:
        for send in sends:
            self._start(self._send(self.members[send.peer], send.message))

    async def _send(self, member: Member, message: ToPeer) -> None:
        """A failure shows where the peer is heard: its channel is closed then."""
        with contextlib.suppress(MlxcelError):
            await member.channel.send(message, SEND_SECONDS)

    async def _hear(self, peer: int) -> None:
        channel = self.members[peer].channel
        try:
            while (message := await channel.receive(None)) is not None:
                self._take(peer, message)
            why = "its process has closed the connection"
        except MlxcelError as error:
            why = str(error)
        except Exception as error:  # a bug here, which must not pass for silence of the peer
            _log.exception("a message of %s cannot be dealt with", self.members[peer].node)
            why = f"a message of it could not be dealt with: {type(error).__name__}: {error}"
        self._lose(self._detector.hung_up(peer, why, time.monotonic()))

    def _take(self, peer: int, message: Any) -> None:
        member, now = self.members[peer], time.monotonic()
        match message:
            case Pong(number, clock, silent):
                if (sent := member.pings.pop(number, None)) is not None:
                    member.clock.hear(sent, now, clock)
                self._lose(self._detector.heard(peer, now, silent))
            case Reported(session, report):
                if not session or session != self._session:
                    return  # also what is said before the first offer, in no session's name
                if (report.stage, report.rank) != self._places[peer]:
                    return
                if self._listener is not None:
                    self._listener.report(peer, report)
                else:  # such as a link that could not be made
                    self._early.append((peer, report))
            case _:
                self._answer(peer, message, now)

    def _answer(self, peer: int, message: ToCoordinator, now: float) -> None:
        if self._bring_up is not None:
            self._send_all(self._bring_up.receive(peer, message, now))
            self._moved.set()

    def _lose(self, loss: Loss | None) -> None:
        if loss is None:
            return
        member = self.members[loss.peer]
        member.loss = PeerLost(member.node, str(member.address), loss.what)
        member.channel.close()  # one that comes back to life finds out, and re-arms
        if self._bring_up is not None:
            self._send_all(self._bring_up.lose(loss.peer, loss.what, time.monotonic()))
            self._moved.set()
        if (listener := self._listener) is not None:
            with self._surviving():
                listener.lost(loss.peer, member.loss)

    async def _ping(self, peer: int) -> None:
        member, number = self.members[peer], 0
        while member.loss is None:
            number += 1
            member.pings.pop(number - 16, None)
            member.pings[number] = time.monotonic()
            await self._send(member, Ping(number))
            await asyncio.sleep(ping_seconds(self._grace))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(ping_seconds(self._grace))
            now = time.monotonic()
            for loss in self._detector.check(now):
                self._lose(loss)
            if (listener := self._listener) is not None:
                with self._surviving():
                    listener.tick(now)

    @staticmethod
    @contextlib.contextmanager
    def _surviving() -> Iterator[None]:
        """A bug in a listener must not end the search for lost peers."""
        try:
            yield
        except Exception:
            _log.exception("what runs on the peers cannot deal with what it is told of them")
