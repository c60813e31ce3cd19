"""What a stage worker tells its engine beside the answers to steps.

``rank`` is the worker's within its stage, 0 where one worker is the whole stage.
"""

from __future__ import annotations

from typing import Literal

import attrs


@attrs.frozen
class Software:
    """What a worker runs with: by name, versions of packages, plugins and the BLAS."""

    versions: dict[str, str]


@attrs.frozen
class Hello:
    """A worker process is up and waits for its stage.

    ``device`` is what it computes on, ``fast_blas`` whether a CPU multiplies with a fast
    library. ``memory`` are the bytes that its device may use, 0 where that is not told.
    """

    pid: int
    software: Software
    device: Literal["cpu", "gpu"] = "cpu"
    fast_blas: bool = False
    memory: int = 0


@attrs.frozen
class Loading:
    """A stage has read ``done`` of its ``total`` bytes."""

    stage: int
    done: int
    total: int
    rank: int = 0


@attrs.frozen
class Loaded:
    """A stage is ready; ``bytes`` are those of its parameters."""

    stage: int
    bytes: int
    seconds: float
    rank: int = 0


@attrs.frozen
class Failed:
    """A stage ended by ``error``; nothing more comes from it."""

    stage: int
    error: BaseException
    rank: int = 0


@attrs.frozen
class Ended:
    """A stage ended without a failure of its own.

    ``busy`` are the seconds it spent in steps with work, between ``first`` and ``last``:
    readings of :func:`time.perf_counter`, None if it never worked. That clock is the same
    for all processes of one machine. ``cut`` says which of its links was closed and why, where
    that ended it and nobody had asked.
    """

    stage: int
    busy: float
    first: float | None
    last: float | None
    cut: str = ""
    rank: int = 0


@attrs.frozen
class Beat:
    """What a stage did since its last beat; it reports at most twice a second.

    ``busy`` are seconds of computing out of ``span`` seconds, ``steps`` the steps with work,
    ``hops`` the microseconds that recent messages took from the sender to this stage, a sample
    of at most 64, and ``memory`` the bytes that MLX holds now. ``received`` are bytes that came
    in over the wire. Readings of clocks of two machines differ by an offset that the receiver of
    beats has to know.
    """

    stage: int
    span: float
    busy: float
    steps: int
    hops: tuple[float, ...] = ()
    memory: int = 0
    received: int = 0
    rank: int = 0


Report = Loading | Loaded | Failed | Ended | Beat
