"""A pipeline whose stages are workers on the peers of a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs

from mlxcel.cluster.coordinator import Coordinator
from mlxcel.cluster.heartbeat import DataPath
from mlxcel.cluster.links import engine_links
from mlxcel.engine.model import Model
from mlxcel.engine.started import started
from mlxcel.errors import ChannelClosed, MlxcelError, PeerLinkBroken, PeerLost, WorkerFailed
from mlxcel.pipeline.accusation import Accusation, broken_connection, root_accusation
from mlxcel.pipeline.link import Inbox, Outbox
from mlxcel.pipeline.pipeline import OnProgress, StageStatus
from mlxcel.pipeline.report import Beat, Ended, Failed, Report
from mlxcel.pipeline.socket_link import ConnectionInbox, ConnectionOutbox
from mlxcel.pipeline.step import Step, StepFailed, Tokens
from mlxcel.pipeline.workers import CAUSE_SECONDS, WorkerPipeline
from mlxcel.transport.contract import Connection, Transport

DATA_GRACES = 2.0
"""Steps that nobody works on are stuck after so many times the grace of heartbeats."""

LINK_SECONDS = 10.0
"""How long a connection for data may take to be made."""


@attrs.frozen
class _Cut:
    """A peer that is missed, and ``loss``, what to say unless more is heard.

    ``at`` is when that was, on this node's monotonic clock. ``said`` is what another rank says of
    it; None where the peer's own words tell.
    """

    peer: int
    loss: PeerLost
    at: float
    said: Accusation | None


class RemotePipeline(WorkerPipeline):
    """One peer per stage, or per rank of one, already activated.

    What goes wrong with a peer becomes a :class:`PeerLost` that names it. Times that peers
    measure with their own clocks are put right by the offsets of those.

    Args:
        coordinator: Connected and brought up; the pipeline releases its peers at the end.
        ranks: How many of its members share a stage; they stand beside each other.
        transport: What carries the steps.
        grace: Seconds of silence after which a node counts as lost.
        credits, timeout: See :class:`WorkerPipeline`.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        transport: Transport,
        *,
        ranks: int = 1,
        grace: float,
        credits: int,
        timeout: float,
    ) -> None:
        stages = len(coordinator.members) // ranks
        super().__init__(stages, credits=credits, timeout=timeout, ranks=ranks)
        self._coordinator = coordinator
        self._transport = transport
        self._path = DataPath(self.count, DATA_GRACES * grace)
        self._ended_peers: set[int] = set()
        self._lost: PeerLost | None = None
        self._cuts: list[_Cut] = []
        self._given_up = False
        self._changed = threading.Condition()

    # What the engine asks for.

    def submit(self, step: Step) -> None:
        """See :meth:`WorkerPipeline.submit`."""
        self._path.submitted(time.monotonic(), work=bool(step.tensors))
        super().submit(step)

    def receive(self) -> Tokens | StepFailed:
        """See :meth:`WorkerPipeline.receive`."""
        answer = super().receive()
        self._path.answered(time.monotonic())
        return answer

    def poll(self) -> Tokens | StepFailed | None:
        """See :meth:`WorkerPipeline.poll`."""
        answer = super().poll()
        if answer is not None:
            self._path.answered(time.monotonic())
        return answer

    def take_hops(self) -> tuple[float, ...]:
        """See :meth:`WorkerPipeline.take_hops`."""
        ahead = -self._coordinator.offset(self._leader(self.count - 1))
        return _corrected(super().take_hops(), ahead)

    def stop(self, *, drain: bool = True) -> tuple[StageStatus, ...]:
        """See :meth:`WorkerPipeline.stop`; the peers are released."""
        with self._changed:
            self._given_up = self._given_up or not drain
            self._changed.notify_all()
        return super().stop(drain=not self._given_up)

    # What the control plane tells, in its own thread.

    def report(self, peer: int, report: Report) -> None:
        """See :class:`mlxcel.cluster.coordinator.Listener`."""
        ahead = self._coordinator.offset(peer)
        match report:
            case Failed(error=WorkerFailed(lost=(int(stage), int(rank))) as error):
                missed = stage * self.ranks + rank
                what = f"the ranks of its stage miss it, though it answers ({error.text})"
                known = range(self.count * self.ranks)
                self._miss(peer, missed if missed in known else peer, what, error.broken)
            case Failed(error=error):
                words = error.text if isinstance(error, WorkerFailed) else str(error)
                self.lost(peer, self._loss(peer, words))
            case Ended(first=first, last=last, cut=cut):
                self.reports.put(
                    attrs.evolve(report, first=_ours(first, ahead), last=_ours(last, ahead))
                )
                what = f"a data link of it is broken, though it answers ({cut})"
                self._miss(peer, peer if cut else None, what)
            case Beat(hops=hops):
                steps = 0 if report.rank else report.steps  # all ranks take the same ones
                self._path.beat(report.stage, report.busy, steps, time.monotonic())
                before = peer - self.ranks
                sender = self._coordinator.offset(before) if report.stage else 0.0
                self.reports.put(attrs.evolve(report, hops=_corrected(hops, ahead - sender)))
            case _:
                self.reports.put(report)

    def lost(self, peer: int, error: PeerLost) -> None:
        """See :class:`mlxcel.cluster.coordinator.Listener`."""
        with self._changed:
            if self._given_up:
                return
            self._lost, self._given_up = error, True
            self._changed.notify_all()
        self.reports.put(Failed(peer // self.ranks, error, peer % self.ranks))
        self._close_links(str(error))  # wakes the engine, which then finds the report

    def tick(self, now: float) -> None:
        """See :class:`mlxcel.cluster.coordinator.Listener`."""
        if self._cuts and now - self._cuts[0].at > CAUSE_SECONDS:  # nothing came that says more
            cut = self._explained()
            self.lost(cut.peer, cut.loss)
        if (link := self._path.stuck(now)) is not None:
            _, receiver = link.split("-")
            peer = self._leader(self.count - 1 if receiver == "engine" else int(receiver))
            what = (
                f"nothing comes through the data link {link}, though the peers answer "
                f"(a firewall, or a broken cable of the network for data)"
            )
            self.lost(peer, self._loss(peer, what))

    def _miss(self, peer: int, missed: int | None, what: str, broken: str = "") -> None:
        """The worker of ``peer`` has ended; because of the peer ``missed``, unless that is None.

        Args:
            broken: How ``peer`` saw the connection with ``missed`` end, if it did.
        """
        with self._changed:
            self._ended_peers.add(peer)
            if missed is not None and not self._given_up:
                places = divmod(peer, self.ranks), divmod(missed, self.ranks)
                said = None if missed == peer else Accusation(*places, broken)
                loss = self._loss(missed, what)
                self._cuts.append(_Cut(missed, loss, time.monotonic(), said))
            self._changed.notify_all()

    def _explained(self) -> _Cut:
        """What is behind all cuts, now that all have said what they saw.

        Who ends does so to others in turn, so the first to be missed counts, or whom that one
        misses, unless it was the connection of two that broke.
        """
        with self._changed:
            cuts, ended_peers = tuple(self._cuts), tuple(self._ended_peers)
        accusations = [cut.said for cut in cuts if cut.said is not None]
        accusing = {it.reporter for it in accusations}
        ended = {divmod(peer, self.ranks) for peer in ended_peers} - accusing
        if broken := broken_connection(accusations, ended):
            one, other = (
                self._coordinator.members[stage * self.ranks + rank]
                for stage, rank in (broken.reporter, broken.accused)
            )
            loss = PeerLinkBroken(
                one.node, str(one.address), broken.broken, other.node, str(other.address)
            )
            return attrs.evolve(cuts[0], loss=loss)
        if cuts[0].said is None:
            return cuts[0]
        root = root_accusation(accusations)
        return next(cut for cut in cuts if cut.said == root)

    def _leader(self, stage: int) -> int:
        """The member that is rank 0 of ``stage``."""
        return stage * self.ranks

    def _loss(self, peer: int, what: str) -> PeerLost:
        member = self._coordinator.members[peer]
        return PeerLost(member.node, str(member.address), what)

    def _who(self, stage: int, rank: int) -> str:
        member = self._coordinator.members[self._leader(stage) + rank]
        return f"{member.node} @ {member.address}"

    def _launch(self) -> tuple[Outbox, Inbox]:
        self._coordinator.listen(self)
        last = self.count - 1
        first_link, last_link = engine_links(self.count, self.ranks)
        there = self._connect(0, first_link)
        try:
            back = self._connect(self._leader(last), last_link)
        except BaseException:
            there.close()
            raise
        first = ConnectionOutbox(there, "engine to stage 0", self.timeout, lambda value: value)
        return first, ConnectionInbox(back, f"stage {last} to engine", self.credits + 1)

    def _connect(self, peer: int, link: str) -> Connection:
        session = self._coordinator.open_link(peer, link, LINK_SECONDS)
        return self._transport.connection(
            session.take_socket(), session.keys, session.address, "pp_activation"
        )

    def _join(self, deadline: float) -> None:
        members = self._coordinator.members
        with self._changed:
            self._changed.wait_for(
                lambda: self._given_up or len(self._ended_peers) == len(members),
                max(0.0, deadline - time.monotonic()),
            )
            self._given_up = True  # what closes from now on is no failure
        self._coordinator.release("the pipeline has stopped")
        self._close_links("the pipeline has stopped")

    def _close_links(self, reason: str) -> None:
        for link in (self._first, self._last):
            if link is not None:
                link.close(reason)

    def _cause(self, closed: ChannelClosed) -> MlxcelError:
        cause = super()._cause(closed)
        if cause is not closed:
            return cause
        if self._lost is not None:
            return self._lost
        if self._cuts:
            return self._explained().loss
        stage = 0 if closed.name.startswith("engine") else self.count - 1
        return self._loss(self._leader(stage), str(closed))


@contextmanager
def running_remotely(
    model: Model,
    coordinator: Coordinator,
    transport: Transport,
    grace: float,
    timeout: float,
    *,
    credits: int,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Iterator[RemotePipeline]:
    """The model's pipeline on the peers, loaded; whatever happens inside, they are released.

    Args:
        model: What the peers have been offered.
        coordinator, transport, grace, timeout, credits: See :class:`RemotePipeline`.
    """
    pipeline = RemotePipeline(
        coordinator,
        transport,
        ranks=model.tensor.size,
        grace=grace,
        credits=credits,
        timeout=timeout,
    )
    with started(pipeline, model, on_progress):
        yield pipeline


def _ours(reading: float | None, ahead: float) -> float | None:
    """A reading of a clock that is ``ahead`` of ours, as ours would have shown it."""
    return None if reading is None else reading - ahead


def _corrected(hops: Sequence[float], ahead: float) -> tuple[float, ...]:
    """Microseconds from a sender to a receiver whose clock is ``ahead`` of the sender's."""
    return tuple(max(0.0, hop - ahead * 1e6) for hop in hops)
