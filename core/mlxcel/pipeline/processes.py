"""A pipeline whose stages, or their ranks, are processes of this machine, linked by socketpairs.

Each worker starts with nothing but a socket to talk with the engine. Over it come its job and the
sockets of its links; it loads the plugins by itself and reads its own weights. When the engine is
gone, its end of that socket closes and the worker ends; when a worker is gone or stands still, the
engine learns it the same way.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

import attrs

from mlxcel.errors import MlxcelError, WorkerDied, WorkerFailed, WorkerMismatch, WorkerSilent
from mlxcel.pipeline.control import (
    RANK_SECONDS,
    Alive,
    Control,
    DataSocket,
    Job,
    receive_control,
    send_control,
    send_socket,
)
from mlxcel.pipeline.grid import LOOPBACK, Given, free_ports, wire
from mlxcel.pipeline.launch import how_it_ended, interrupts_held, worker_command
from mlxcel.pipeline.link import Inbox, Outbox
from mlxcel.pipeline.pipeline import StageStatus
from mlxcel.pipeline.report import Ended, Failed, Hello, Software
from mlxcel.pipeline.socket_link import ConnectionInbox, ConnectionOutbox
from mlxcel.pipeline.workers import WorkerPipeline
from mlxcel.stage.contract import StageSpec
from mlxcel.transport.contract import TransportOptions
from mlxcel.transport.plain import PlainConnection
from mlxcel.transport.spin import spin_for

GRACE_SECONDS = 5.0
"""How long a worker may take to end after its control socket has closed."""

SILENT_SECONDS = 10.0
"""After how long without a sign of life a worker is taken for stopped."""

STARTING_SECONDS = 60.0
"""The same for a worker that has not said hello: a cold disk may hold up its first imports."""

_SLICE = 0.5


@attrs.define
class Worker:
    """The process of one stage, or of one rank, and the engine's end of its control socket."""

    spec: StageSpec
    process: subprocess.Popen[bytes]
    control: socket.socket
    reader: threading.Thread | None = None


class ProcessPipeline(WorkerPipeline):
    """One process per stage, or one per rank of each.

    Args:
        specs: One for each process: the stages in order, the ranks of a stage one after the other.
        credits: Steps in flight at most; what every receiving end holds.
        timeout: Seconds any one wait may last.
        environment: What the workers' environment has beyond this process's.
        without: Plugins that the user left out.
        grace: Seconds without a sign of life after which a worker is taken for stopped.
        rank_timeout: Seconds that the ranks of a stage may make each other wait.
        collectives: How they reach each other, see :class:`mlxcel.pipeline.control.Job`.
    """

    def __init__(
        self,
        specs: Sequence[StageSpec],
        *,
        credits: int,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        without: Sequence[str] = (),
        grace: float = SILENT_SECONDS,
        rank_timeout: float = RANK_SECONDS,
        collectives: str = "transport",
    ) -> None:
        count = specs[-1].index + 1
        super().__init__(count, credits=credits, timeout=timeout, ranks=len(specs) // count)
        self._specs = tuple(specs)
        self._environment = {**os.environ, **(environment or {})}
        self._without = tuple(without)
        self._grace = grace
        self._rank_timeout = rank_timeout
        self._collectives = collectives
        self._workers: list[Worker] = []
        self._software: Software | None = None
        self._greeting = threading.Lock()
        self._inbox: ConnectionInbox | None = None

    def _launch(self) -> tuple[Outbox, Inbox]:
        self._workers = [self._spawn(spec) for spec in self._specs]
        options = TransportOptions(spin=spin_for(len(self._specs)))
        grid = wire(self._specs, options, self._rank_timeout)
        last = f"stage {self.count - 1}"
        self._inbox = ConnectionInbox(
            PlainConnection(grid.last, last, options), f"{last} to engine", self.credits + 1
        )
        fabrics = [self._fabric() for _ in range(self.count)]
        for worker, sockets in zip(self._workers, grid.workers, strict=True):
            self._give(worker, fabrics[worker.spec.index], sockets)
            worker.reader = threading.Thread(
                target=self._listen, args=(worker,), name="mlxcel-control", daemon=True
            )
            worker.reader.start()
        first = ConnectionOutbox(
            PlainConnection(grid.first, "stage 0", options),
            "engine to stage 0",
            self.timeout,
            lambda value: value,
        )
        return first, self._inbox

    def _fabric(self) -> tuple[str, ...]:
        """Where the ranks of one stage find each other, if not through what they are given."""
        if self._collectives == "ring":
            return tuple(f"{LOOPBACK}:{port}" for port in free_ports(self.ranks))
        return (LOOPBACK,) * self.ranks if self._collectives != "transport" else ()

    def _give(self, worker: Worker, fabric: tuple[str, ...], sockets: Sequence[Given]) -> None:
        job = Job(
            worker.spec,
            self.credits,
            self.timeout,
            self._rank_timeout,
            self._collectives,
            fabric,
        )
        with contextlib.suppress(OSError):  # a worker that is gone already: _listen reports it
            send_control(worker.control, job)
            for data, sock in sockets:
                send_socket(worker.control, data, sock)
        # The worker has its own copies: what it alone uses must close with it.
        for _, sock in sockets:
            sock.close()

    def _spawn(self, spec: StageSpec) -> Worker:
        here, there = socket.socketpair()
        with there, interrupts_held():
            process = subprocess.Popen(
                worker_command(there.fileno(), self._without),
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # whatever a library prints must not end up in the engine's output
                env=self._environment,
            )
        return Worker(spec, process, here)

    def _listen(self, worker: Worker) -> None:
        """Pass a worker's reports on; a worker that goes without a word is a failure."""
        try:
            error = self._follow(worker)
        except MlxcelError as raised:
            error = raised
        if error is not None:
            self._fail(worker, error)

    def _fail(self, worker: Worker, error: BaseException) -> None:
        """Tell whoever waits; a rank's link need not be the one to the engine, which is open."""
        if isinstance(error, WorkerFailed):
            error.rank = worker.spec.rank
        self.reports.put(Failed(worker.spec.index, error, worker.spec.rank or 0))
        if self._inbox is not None:
            self._inbox.close(f"{worker.spec.title} has failed")

    def _follow(self, worker: Worker) -> MlxcelError | None:
        """Pass reports on until the worker is gone; returns what is wrong with that."""
        stage, rank = worker.spec.index, worker.spec.rank
        said_hello, said_goodbye = False, False
        while True:
            grace = self._grace if said_hello else max(self._grace, STARTING_SECONDS)
            if not _speaks(worker.control, grace):
                worker.process.kill()  # it is lost; what is left of it must not be waited for
                return WorkerSilent(stage, worker.process.pid, grace, rank)
            match _message(worker.control):
                case None if said_goodbye:
                    return None
                case None:
                    return WorkerDied(stage, worker.process.pid, _how(worker), rank)
                case Hello() as hello:
                    said_hello = True
                    self._greet(worker.spec, hello)
                case Alive() | Job() | DataSocket():
                    pass
                case Failed(_, error):
                    said_goodbye = True
                    self._fail(worker, error)
                case report:
                    said_goodbye = said_goodbye or isinstance(report, Ended)
                    self.reports.put(report)

    def _greet(self, spec: StageSpec, hello: Hello) -> None:
        """All workers must run the same software, or split would not equal whole."""
        with self._greeting:
            if self._software is None:
                self._software = hello.software
        ours, theirs = self._software.versions, hello.software.versions
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                here, there = str(ours.get(name)), str(theirs.get(name))
                raise WorkerMismatch(spec.index, name, here, there, spec.rank)

    def stop(self, *, drain: bool = True) -> tuple[StageStatus, ...]:
        """See :meth:`WorkerPipeline.stop`; what is given up ends with its control socket."""
        if not drain:
            for worker in self._workers:
                _close(worker.control)
        return super().stop(drain=drain)

    def _join(self, deadline: float) -> None:
        if any(worker.process.poll() not in (None, 0) for worker in self._workers):
            deadline = time.monotonic()  # one is gone, so the others will not hear of the Stop
        self._wait(deadline)
        told = [worker for worker in self._workers if worker.control.fileno() >= 0]
        for worker in told:
            _close(worker.control)  # tells a worker that has not ended to do so
        if told:
            self._wait(time.monotonic() + GRACE_SECONDS)
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()
            if worker.reader is not None:
                worker.reader.join()
        if self._inbox is not None:
            self._inbox.close("the pipeline has stopped")

    def _wait(self, deadline: float) -> None:
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))


def _speaks(control: socket.socket, grace: float) -> bool:
    """Whether a message or the end comes within ``grace`` seconds.

    They are counted in slices, so that the time does not count in which this process itself was
    stopped.
    """
    poll = select.poll()
    try:
        poll.register(control, select.POLLIN)
    except ValueError:  # stop() has closed it; the next read says so
        return True
    return any(poll.poll(_SLICE * 1000) for _ in range(math.ceil(grace / _SLICE)))


def _message(control: socket.socket) -> Control | None:
    """The worker's next message, None where it is gone."""
    try:
        return receive_control(control)
    except OSError:  # gone without having read all, or stop() has closed our end
        return None


def _how(worker: Worker) -> str:
    try:
        return how_it_ended(worker.process.wait(GRACE_SECONDS))
    except subprocess.TimeoutExpired:
        return "it closed its connection and hangs"


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
