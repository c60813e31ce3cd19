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
from typing import TYPE_CHECKING

# What takes long is imported by the functions that use it, when the owner hears from us already.
from mlxcel.pipeline.report import Hello
from mlxcel.stage.owner import Owner
from mlxcel.stage.serve import serve

if TYPE_CHECKING:
    from mlxcel.plugins import Plugins


def main(argv: list[str]) -> int:
    """Be a stage until the owner says stop or is gone; returns the exit code."""
    # Signals of a terminal reach the whole process group; ending workers is the owner's business.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    owner = Owner(socket.socket(fileno=int(argv[0])))
    plugins = discover(argv[1:])
    owner.say(hello(plugins))
    return serve(*owner.work(), plugins, owner.say, owner.at_the_end)


def discover(without: list[str]) -> Plugins:
    """The plugins, once all is imported that takes long."""
    from mlxcel import compat  # noqa: F401 - mlx-lm takes longest
    from mlxcel.plugins import Plugins
    from mlxcel.stage.build import FamilyExecutors

    plugins = Plugins.discover(without=without)
    plugins.register_default(FamilyExecutors(plugins))
    return plugins


def hello(plugins: Plugins) -> Hello:
    """What this process says of itself."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
