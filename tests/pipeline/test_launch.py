"""How worker processes are started and how their ends are told."""

import signal
import subprocess
import sys

import pytest

from mlxcel.pipeline.launch import how_it_ended, interrupts_held, worker_command

SIGNALS = (signal.SIGINT, signal.SIGHUP)
ENDED_AT_ONCE = """
import os, signal, sys
os.kill(os.getpid(), int(sys.argv[1]))
print("goes on")
"""


def test_ends_are_told_in_words() -> None:
    """A signal by its name, anything else by its number."""
    assert how_it_ended(-9) == "killed by SIGKILL"
    assert how_it_ended(3) == "exit code 3"


def test_plugins_that_are_left_out_stand_in_the_command() -> None:
    """A worker knows from its start which plugins not to load."""
    assert worker_command(7, ["a", "b"])[-3:] == ["7", "a", "b"]


@pytest.mark.parametrize("number", SIGNALS)
def test_an_early_signal_of_the_terminal_does_not_end_a_worker(number: signal.Signals) -> None:
    """What comes before a worker can ignore it is held back; here it counts again."""
    with interrupts_held():
        command = [sys.executable, "-c", ENDED_AT_ONCE, str(int(number))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
