"""How worker processes are started and how their ends are told."""

import signal
import subprocess
import sys

from mlxcel.pipeline.launch import how_it_ended, interrupts_held, worker_command

INTERRUPTED_AT_ONCE = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
print("goes on")
"""


def test_ends_are_told_in_words() -> None:
    """A signal by its name, anything else by its number."""
    assert how_it_ended(-9) == "killed by SIGKILL"
    assert how_it_ended(3) == "exit code 3"


def test_plugins_that_are_left_out_stand_in_the_command() -> None:
    """A worker knows from its start which plugins not to load."""
    assert worker_command(7, ["a", "b"])[-3:] == ["7", "a", "b"]


def test_an_early_interrupt_does_not_end_a_worker() -> None:
    """Ctrl-C that comes before a worker can ignore it is held back; here it counts again."""
    with interrupts_held():
        done = subprocess.run(
            [sys.executable, "-c", INTERRUPTED_AT_ONCE], capture_output=True, text=True, timeout=60
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
