"""Worker processes that take one job after the other, so that tests need not wait for imports.

``python -m mlxcel.testing.armed INLET`` is such a process. For each job a new control socket comes
through the inherited socket INLET; the process ends when that closes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from mlxcel.pipeline.control import (
    DataSocket,
    FromWorker,
    Job,
    receive_control,
    receive_socket,
    send_control,
)
from mlxcel.pipeline.processes import ProcessPipeline, Worker
from mlxcel.pipeline.sockets import SocketKey, sockets_of
from mlxcel.stage.contract import StageSpec
from mlxcel.stage.owner import Given


@attrs.define
class Armed:
    """Processes that wait for their next job; a context manager that ends them.

    Args:
        count: How many there are.
        environment: What they have in their environment beyond this process's.
    """

    count: int
    environment: Mapping[str, str] = attrs.field(factory=dict)
    _processes: list[subprocess.Popen[bytes]] = attrs.field(init=False, factory=list)
    _inlets: list[socket.socket] = attrs.field(init=False, factory=list)

    def __enter__(self) -> Armed:
        for _ in range(self.count):
            here, there = socket.socketpair()
            with there:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "mlxcel.testing.armed", str(there.fileno())],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env={**os.environ, **self.environment},
                )
            self._processes.append(process)
            self._inlets.append(here)
        return self

    def __exit__(self, *_: object) -> None:
        for inlet in self._inlets:
            inlet.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def take(self, index: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Process ``index`` and the owner's end of a new control socket to it."""
        here, there = socket.socketpair()
        with there:
            socket.send_fds(self._inlets[index], [b"\0"], [there.fileno()])
        return self._processes[index], here


class ArmedPipeline(ProcessPipeline):
    """A pipeline of ``armed`` processes, which outlive it; see :class:`ProcessPipeline`."""

    def __init__(self, armed: Armed, specs: Sequence[StageSpec], **options: Any) -> None:
        super().__init__(specs, **options)
        self._armed = armed

    def _spawn(self, spec: StageSpec) -> Worker:
        return Worker(spec, *self._armed.take(spec.index * self.ranks + (spec.rank or 0)))

    def _join(self, deadline: float) -> None:
        for worker in self._workers:
            if worker.reader is not None:
                worker.reader.join(max(0.0, deadline - time.monotonic()))
            worker.control.close()
        if self._inbox is not None:
            self._inbox.close("the pipeline has stopped")


def main(argv: list[str]) -> int:
    """Take jobs until the inlet closes; returns the exit code."""
    import mlx.core as mx

    from mlxcel.stage.child import discover, hello
    from mlxcel.stage.serve import serve

    inlet = socket.socket(fileno=int(argv[0]))
    plugins = discover([])
    while numbers := socket.recv_fds(inlet, 1, 1)[1]:
        with socket.socket(fileno=numbers[0]) as owner:

            def say(message: FromWorker, owner: socket.socket = owner) -> None:
                with contextlib.suppress(OSError):
                    send_control(owner, message)

            say(hello(plugins))
            # The job before has dropped all streams of this thread, its default one among them.
            mx.set_default_stream(mx.new_stream(mx.default_device()))
            serve(*_work(owner), plugins, say)
    return 0


def _work(owner: socket.socket) -> tuple[Job, dict[SocketKey, Given]]:
    """The next job and its sockets."""
    job: Job | None = None
    sockets: dict[SocketKey, Given] = {}
    while job is None or sockets.keys() < sockets_of(job.spec):
        match receive_control(owner):
            case Job() as job:
                pass
            case DataSocket() as data:
                sockets[data.direction, data.rank] = (data, receive_socket(owner))
            case _:
                raise EOFError("the owner has given no job")
    return job, sockets


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
