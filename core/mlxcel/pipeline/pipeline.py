"""What the engine sees of a running pipeline, whatever its stages run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs

from mlxcel.pipeline.step import Step, StepFailed, Tokens

OnProgress = Callable[[int, int, int], None]
"""Called while loading with a stage, its bytes done and its bytes in all.

Without news it is called with the latest figures a few times a second; what it raises ends the
loading.
"""


@attrs.frozen
class StageStatus:
    """One stage after the run.

    ``busy_seconds`` are those spent in steps with work, out of the ``span_seconds`` between
    the first step of any stage and the end of the last one.
    """

    stage: int
    bytes: int
    busy_seconds: float
    span_seconds: float

    @property
    def busy_fraction(self) -> float:
        return self.busy_seconds / self.span_seconds if self.span_seconds else 0.0

    @property
    def bubble_fraction(self) -> float:
        return 1.0 - self.busy_fraction


class Pipeline(Protocol):
    """A chain of stages: steps go in at the first, answers come out of the last."""

    credits: int
    """Steps that may be in flight at once; every queue on the way holds that many."""

    def start(self, on_progress: OnProgress) -> None:
        """Load all stages; returns when each is ready."""
        ...

    def submit(self, step: Step) -> None:
        """Hand a step to the first stage; never blocks while credits are kept."""
        ...

    def receive(self) -> Tokens | StepFailed:
        """The next answer, in the order of the steps."""
        ...

    def poll(self) -> Tokens | StepFailed | None:
        """The next answer if it is there already, else None."""
        ...

    def listen(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called, in whichever thread, when there may be something to poll."""

    def stop(self) -> tuple[StageStatus, ...]:
        """End all stages and report on each."""
        ...
