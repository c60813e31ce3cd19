"""How a worker process is started, and how its end is put in words."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def worker_command(control: int, without: Sequence[str] = ()) -> list[str]:
    """The command line of a worker.

    Args:
        control: The number of its inherited socket to the owner.
        without: Plugins that the user left out.
    """
    # -P: nothing is imported from the folder that we happen to be in.
    return [sys.executable, "-P", "-m", "mlxcel.stage.child", str(control), *without]


def how_it_ended(code: int) -> str:
    """The exit status of a process in words; negative ones are signals, as in subprocess."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
