"""How a worker process is started, and how its end is put in words."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def worker_command(control: int, without: Sequence[str] = ()) -> list[str]:
    """The command line of a worker.

    Args:
        control: The number of its inherited socket to the owner.
        without: Plugins that the user left out.
    """
    # -P: nothing is imported from the folder that we happen to be in.
    return [sys.executable, "-P", "-m", "mlxcel.stage.child", str(control), *without]


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Within this, SIGINT and SIGHUP wait, for ever in the processes that this thread starts.

    Ctrl-C and the end of a terminal reach its whole process group, so also a worker that is still
    importing what it would ignore them with.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def how_it_ended(code: int) -> str:
    """The exit status of a process in words; negative ones are signals, as in subprocess."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
