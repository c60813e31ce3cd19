"""A pipeline whose stages are processes of this machine, linked by Unix socketpairs.

Each worker starts with nothing but three sockets: one to receive steps, one to send them
on, one to talk with the engine. It learns its stage over the last, loads the plugins by
itself and reads its own weights. When the engine is gone, its end of that socket closes and
the worker ends; when a worker is gone, the engine learns it the same way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import attrs

from mlxcel.errors import MlxcelError, WorkerDied, WorkerMismatch
from mlxcel.pipeline.control import Job, receive_control, send_control
from mlxcel.pipeline.link import Inbox, Outbox
from mlxcel.pipeline.pipeline import StageStatus
from mlxcel.pipeline.report import Ended, Failed, Hello, Software
from mlxcel.pipeline.socket_link import SocketInbox, SocketOutbox
from mlxcel.pipeline.workers import WorkerPipeline
from mlxcel.stage.contract import StageSpec

GRACE_SECONDS = 5.0
"""How long a worker may take to end after its control socket has closed."""


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
    """

    def __init__(
        self,
        specs: Sequence[StageSpec],
        *,
        credits: int,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        without: Sequence[str] = (),
    ) -> None:
        super().__init__(len(specs), credits=credits, timeout=timeout)
        self._specs = tuple(specs)
        self._environment = {**os.environ, **(environment or {})}
        self._without = tuple(without)
        self._workers: list[Worker] = []
        self._software: Software | None = None
        self._inbox: SocketInbox | None = None

    def _launch(self) -> tuple[Outbox, Inbox]:
        pairs = [socket.socketpair() for _ in range(self.count + 1)]
        for spec, (_, receiving), (sending, _) in zip(
            self._specs, pairs[:-1], pairs[1:], strict=True
        ):
            self._workers.append(self._spawn(spec, receiving, sending))
        # Only now has every worker its own copies: what it alone uses must close with it.
        for _, receiving in pairs[:-1]:
            receiving.close()
        for sending, _ in pairs[1:]:
            sending.close()
        first = SocketOutbox(pairs[0][0], "engine to stage 0", self.timeout, lambda value: value)
        name = f"stage {self.count - 1} to engine"
        self._inbox = SocketInbox(pairs[-1][1], name, self.credits + 1)
        for worker in self._workers:
            worker.reader = threading.Thread(
                target=self._listen, args=(worker,), name="mlxcel-control", daemon=True
            )
            worker.reader.start()
            job = Job(worker.spec, self.credits, self.timeout, self._without)
            with contextlib.suppress(OSError):  # a worker that is gone already: _listen reports it
                send_control(worker.control, job)
        return first, self._inbox

    def _spawn(self, spec: StageSpec, receiving: socket.socket, sending: socket.socket) -> Worker:
        here, there = socket.socketpair()
        with there:
            fds = [receiving.fileno(), sending.fileno(), there.fileno()]
            process = subprocess.Popen(
                # -P: nothing is imported from the folder that we happen to be in.
                [sys.executable, "-P", "-m", "mlxcel.stage.child", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=2,  # whatever a library prints must not end up in the engine's output
                env=self._environment,
            )
        return Worker(spec, process, here)

    def _listen(self, worker: Worker) -> None:
        """Pass a worker's reports on; a worker that goes without a word is a failure."""
        stage, said_goodbye = worker.spec.index, False
        try:
            while (message := receive_control(worker.control)) is not None:
                said_goodbye = isinstance(message, Ended | Failed)
                if not isinstance(message, Job):
                    self.reports.put(message)
        except (MlxcelError, OSError) as error:
            if not said_goodbye:
                self.reports.put(Failed(stage, error))
            return
        if not said_goodbye:
            self.reports.put(Failed(stage, WorkerDied(stage, worker.process.pid, _how(worker))))
            if self._inbox is not None:
                self._inbox.close(f"stage {stage} died")

    def _greet(self, hello: Hello) -> None:
        """All workers must run the same software, or split would not equal whole."""
        if self._software is None:
            self._software = hello.software
        ours, theirs = self._software.versions, hello.software.versions
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise WorkerMismatch(hello.stage, name, str(ours.get(name)), str(theirs.get(name)))

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


def _how(worker: Worker) -> str:
    try:
        code = worker.process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return "it closed its connection and hangs"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
