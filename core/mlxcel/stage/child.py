"""The process of one stage: ``python -m mlxcel.stage.child CONTROL [PLUGIN…]``.

CONTROL is the number of an inherited socket to the process that owns this one; the rest are
plugins that the user left out. The process can be started before anybody knows its stage: it
imports what takes long, says hello and waits for its job and for the sockets of its links.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

# What takes long is imported by the functions that use it, when the owner hears from us already.
from mlxcel.errors import MlxcelError
from mlxcel.pipeline.control import DataSocket
from mlxcel.pipeline.report import Failed, Hello
from mlxcel.pipeline.socket_link import ConnectionInbox, ConnectionOutbox
from mlxcel.pipeline.worker import run_stage
from mlxcel.stage.owner import Owner
from mlxcel.transport.plain import PlainConnection

if TYPE_CHECKING:
    from mlxcel.plugins import Plugins
    from mlxcel.transport.contract import Connection


def main(argv: list[str]) -> int:
    """Be a stage until the owner says stop or is gone; returns the exit code."""
    # Ctrl-C reaches the whole process group; ending the workers is the owner's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = Owner(socket.socket(fileno=int(argv[0])))
    plugins = _discover(argv[1:])
    owner.say(_hello(plugins))
    return _serve(owner, plugins)


def _serve(owner: Owner, plugins: Plugins) -> int:
    from mlxcel.stage.arrays import to_wire
    from mlxcel.stage.build import build_executor
    from mlxcel.wire.tensor import WireTensor

    def as_wire(value: Any) -> WireTensor:
        return value if isinstance(value, WireTensor) else to_wire(value)

    job, (to_us, receiving), (from_us, sending) = owner.work()
    try:
        source = _connection(plugins, to_us, receiving)
        target = _connection(plugins, from_us, sending)
    except MlxcelError as error:
        owner.say(Failed(job.spec.index, error))
        return 1
    inbox = ConnectionInbox(source, to_us.name, job.credits + 1)
    outbox = ConnectionOutbox(target, from_us.name, job.timeout, as_wire)
    owner.at_the_end(inbox.close, outbox.close)
    run_stage(job.spec, lambda spec: build_executor(plugins, spec), inbox, outbox, owner.say)
    return 0


def _discover(without: list[str]) -> Plugins:
    from mlxcel import compat  # noqa: F401 - mlx-lm takes longest
    from mlxcel.plugins import Plugins
    from mlxcel.stage.build import FamilyExecutors

    plugins = Plugins.discover(without=without)
    plugins.register_default(FamilyExecutors(plugins))
    return plugins


def _hello(plugins: Plugins) -> Hello:
    import mlx.core as mx

    from mlxcel.stage.blas import running_blas
    from mlxcel.stage.software import running_software

    gpu = mx.default_device().type == mx.DeviceType.gpu
    memory = mx.device_info().get("max_recommended_working_set_size", 0) if gpu else 0
    return Hello(
        os.getpid(),
        running_software(plugins),
        "gpu" if gpu else "cpu",
        running_blas().fast,
        int(memory),
    )


def _connection(plugins: Plugins, data: DataSocket, sock: socket.socket) -> Connection:
    if not data.transport:
        return PlainConnection(sock, data.peer, data.options)
    from mlxcel.transport.make import make_transport

    transport = make_transport(plugins, data.transport, data.options)
    return transport.connection(sock, data.keys, data.peer, data.traffic)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
