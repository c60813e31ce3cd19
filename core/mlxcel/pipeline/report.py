"""What a stage worker tells its engine beside the answers to steps."""

from __future__ import annotations

import attrs


@attrs.frozen
class Software:
    """What a worker runs with: by name, versions of packages, plugins and the BLAS."""

    versions: dict[str, str]


@attrs.frozen
class Hello:
    """A worker process is up."""

    stage: int
    pid: int
    software: Software


@attrs.frozen
class Loading:
    """A stage has read ``done`` of its ``total`` bytes."""

    stage: int
    done: int
    total: int


@attrs.frozen
class Loaded:
    """A stage is ready; ``bytes`` are those of its parameters."""

    stage: int
    bytes: int
    seconds: float


@attrs.frozen
class Failed:
    """A stage ended by ``error``; nothing more comes from it."""

    stage: int
    error: BaseException


@attrs.frozen
class Ended:
    """A stage ended as asked.

    ``busy`` are the seconds it spent in steps with work, between ``first`` and ``last``:
    readings of :func:`time.perf_counter`, None if it never worked. That clock is the same
    for all processes of one machine.
    """

    stage: int
    busy: float
    first: float | None
    last: float | None


Report = Hello | Loading | Loaded | Failed | Ended
