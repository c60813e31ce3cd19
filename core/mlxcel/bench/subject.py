"""Processes that a bench measures: they take and give lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from mlxcel.errors import DeadlineError, MlxcelError

TIMEOUT = 120.0


class Subject:
    """Processes that work together; the first one says how long it took.

    Args:
        name: For tables.
        module: What each of them runs.
        roles: What each of them is, as attrs instances: the first line that it reads. Each
            answers it, and the first one every further line.
        descriptors: Sockets that they inherit.
        environments: Variables that each gets.
    """

    def __init__(
        self,
        name: str,
        module: str,
        roles: Sequence[Any],
        descriptors: Sequence[int] = (),
        environments: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        self.name = name
        self._ends = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=descriptors,
                env=os.environ | environment,
            )
            for environment in environments or [{}] * len(roles)
        ]
        for end, role in zip(self._ends, roles, strict=True):
            _tell(end, attrs.asdict(role))
        for end in self._ends:
            self._hear(end)

    def measure(self, size: int, rounds: int) -> list[float]:
        """The seconds of each of ``rounds`` rounds with ``size`` bytes."""
        for end in reversed(self._ends):
            _tell(end, [size, rounds])
        times: list[float] = self._hear(self._ends[0])
        return times

    def close(self) -> None:
        """End all processes."""
        for end in self._ends:
            assert end.stdin is not None
            end.stdin.close()
        for end in self._ends:
            try:
                end.wait(5)
            except subprocess.TimeoutExpired:
                end.kill()
                end.wait()
            assert end.stdout is not None
            end.stdout.close()

    def _hear(self, end: subprocess.Popen[str]) -> list[float]:
        """What ``end`` says next; a timer kills it if it says nothing."""
        assert end.stdout is not None
        timer = threading.Timer(TIMEOUT, end.kill)
        timer.start()
        line = end.stdout.readline()
        expired = not timer.is_alive()
        timer.cancel()
        if line:
            return json.loads(line)  # type: ignore[no-any-return]
        if expired:
            raise DeadlineError(self.name, "a measurement", TIMEOUT, "Is the machine overloaded?")
        raise BenchError(self.name)


@attrs.define(eq=False)
class BenchError(MlxcelError):
    """A subject whose process has ended."""

    subject: str

    def __str__(self) -> str:
        return f"bench: a process of {self.subject} has ended; its own words are above."


def _tell(end: subprocess.Popen[str], what: object) -> None:
    assert end.stdin is not None
    end.stdin.write(json.dumps(what) + "\n")
    end.stdin.flush()
