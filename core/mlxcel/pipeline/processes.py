"""A pipeline whose stages are processes of this machine, linked by Unix socketpairs.

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

from mlxcel.errors import MlxcelError, WorkerDied, WorkerMismatch, WorkerSilent
from mlxcel.pipeline.control import (
    Alive,
    Control,
    DataSocket,
    Job,
    receive_control,
    send_control,
    send_socket,
)
from mlxcel.pipeline.launch import how_it_ended, worker_command
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
    """One stage's process and the engine's end of its control socket."""

    spec: StageSpec
    process: subprocess.Popen[bytes]
    control: socket.socket
    reader: threading.Thread | None = None


class ProcessPipeline(WorkerPipeline):
    """One process per stage.

    Args:
        specs: The stages, in order.
        credits: Steps in flight at most; what every receiving end holds.
        timeout: Seconds any one wait may last.
        environment: What the workers' environment has beyond this process's.
        without: Plugins that the user left out.
        grace: Seconds without a sign of life after which a worker is taken for stopped.
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
    ) -> None:
        super().__init__(len(specs), credits=credits, timeout=timeout)
        self._specs = tuple(specs)
        self._environment = {**os.environ, **(environment or {})}
        self._without = tuple(without)
        self._grace = grace
        self._workers: list[Worker] = []
        self._software: Software | None = None
        self._greeting = threading.Lock()
        self._inbox: ConnectionInbox | None = None

    def _launch(self) -> tuple[Outbox, Inbox]:
        self._workers = [self._spawn(spec) for spec in self._specs]
        pairs = [socket.socketpair() for _ in range(self.count + 1)]
        names = ["engine", *(f"stage {spec.index}" for spec in self._specs), "engine"]
        options = TransportOptions(spin=spin_for(self.count))
        self._inbox = ConnectionInbox(
            PlainConnection(pairs[-1][1], names[-2], options),
            f"{names[-2]} to engine",
            self.credits + 1,
        )
        for index, worker in enumerate(self._workers):
            before, own, after = names[index : index + 3]
            receiving, sending = pairs[index][1], pairs[index + 1][0]
            with contextlib.suppress(OSError):  # a worker that is gone already: _listen reports it
                send_control(worker.control, Job(worker.spec, self.credits, self.timeout))
                for data, sock in (
                    (
                        DataSocket("receive", f"{before} to {own}", before, options=options),
                        receiving,
                    ),
                    (DataSocket("send", f"{own} to {after}", after, options=options), sending),
                ):
                    send_socket(worker.control, data, sock)
            # The worker has its own copies: what it alone uses must close with it.
            receiving.close()
            sending.close()
            worker.reader = threading.Thread(
                target=self._listen, args=(worker,), name="mlxcel-control", daemon=True
            )
            worker.reader.start()
        first = ConnectionOutbox(
            PlainConnection(pairs[0][0], names[1], options),
            "engine to stage 0",
            self.timeout,
            lambda value: value,
        )
        return first, self._inbox

    def _spawn(self, spec: StageSpec) -> Worker:
        here, there = socket.socketpair()
        with there:
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
            self.reports.put(Failed(worker.spec.index, error))
            if self._inbox is not None:
                self._inbox.close(f"stage {worker.spec.index} has failed")

    def _follow(self, worker: Worker) -> MlxcelError | None:
        """Pass reports on until the worker is gone; returns what is wrong with that."""
        stage, said_hello, said_goodbye = worker.spec.index, False, False
        while True:
            grace = self._grace if said_hello else max(self._grace, STARTING_SECONDS)
            if not _speaks(worker.control, grace):
                worker.process.kill()  # it is lost; what is left of it must not be waited for
                return WorkerSilent(stage, worker.process.pid, grace)
            match _message(worker.control):
                case None if said_goodbye:
                    return None
                case None:
                    return WorkerDied(stage, worker.process.pid, _how(worker))
                case Hello() as hello:
                    said_hello = True
                    self._greet(stage, hello)
                case Alive() | Job() | DataSocket():
                    pass
                case report:
                    said_goodbye = isinstance(report, Ended | Failed)
                    self.reports.put(report)

    def _greet(self, stage: int, hello: Hello) -> None:
        """All workers must run the same software, or split would not equal whole."""
        with self._greeting:
            if self._software is None:
                self._software = hello.software
        ours, theirs = self._software.versions, hello.software.versions
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise WorkerMismatch(stage, name, str(ours.get(name)), str(theirs.get(name)))

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
