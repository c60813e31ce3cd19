"""The process of one stage: ``python -m mlxcel.stage.child RECEIVE SEND CONTROL``.

The arguments are the numbers of three inherited sockets.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time

from mlxcel.errors import WireError
from mlxcel.pipeline.control import Job, receive_control, send_control
from mlxcel.pipeline.report import Hello, Report
from mlxcel.pipeline.socket_link import SocketInbox, SocketOutbox
from mlxcel.pipeline.worker import run_stage
from mlxcel.plugins import Plugins
from mlxcel.stage.arrays import to_wire
from mlxcel.stage.build import FamilyExecutors, build_executor
from mlxcel.stage.software import running_software
from mlxcel.wire.tensor import WireTensor

LAST_STEP_SECONDS = 2.0
"""How long the running step may still take once the engine is gone."""


def main(argv: list[str]) -> int:
    """Be a stage until the engine says stop or is gone; returns the exit code."""
    # Ctrl-C reaches the whole process group; ending the workers is the engine's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    receiving, sending, control = (socket.socket(fileno=int(number)) for number in argv)
    job = receive_control(control)
    if not isinstance(job, Job):
        return 1
    stage = job.spec.index
    plugins = Plugins.discover(without=job.without)
    plugins.register_default(FamilyExecutors(plugins))
    lock = threading.Lock()

    def report(message: Report) -> None:
        with lock, contextlib.suppress(OSError):  # an engine that is gone: the watch ends us
            send_control(control, message)

    report(Hello(stage, os.getpid(), running_software(plugins)))
    inbox = SocketInbox(receiving, f"to stage {stage}", job.credits + 1)
    outbox = SocketOutbox(sending, f"from stage {stage}", job.timeout, _as_wire)
    threading.Thread(target=_watch, args=(control, inbox, outbox), daemon=True).start()
    run_stage(job.spec, lambda spec: build_executor(plugins, spec), inbox, outbox, report)
    return 0


def _as_wire(value: object) -> WireTensor:
    return value if isinstance(value, WireTensor) else to_wire(value)  # type: ignore[arg-type]


def _watch(control: socket.socket, inbox: SocketInbox, outbox: SocketOutbox) -> None:
    """End this process when the engine's end of the control socket closes."""
    with contextlib.suppress(OSError, WireError):
        while receive_control(control) is not None:
            pass
    inbox.close("the engine is gone")
    outbox.close("the engine is gone")
    # The stage finds its links closed after its step; if the step is long, go without it.
    time.sleep(LAST_STEP_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
