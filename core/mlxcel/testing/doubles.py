"""Stages and a pipeline without a model, for testing what stands around them; no MLX."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlxcel.pipeline.operations import (
    Copy,
    Extend,
    Extract,
    Filter,
    Merge,
    New,
    Operation,
    Release,
)
from mlxcel.pipeline.pipeline import OnProgress, StageStatus
from mlxcel.pipeline.step import Logprobs, Step, StepFailed, Tokens
from mlxcel.stage.contract import Progress, StageSpec

Script = Callable[[int, int], int]
"""The token that a request gets: of the request's number and how many it has had before."""


SCRIPTED = Logprobs(-1.0)
"""What rows get that ask for log-probabilities."""


def count_up(request: int, made: int) -> int:
    """The script that answers 1000 * request, then one more each time."""
    return 1000 * request + made


def specs(count: int) -> tuple[StageSpec, ...]:
    """``count`` stages of one layer each, of a checkpoint that does not exist."""
    return tuple(StageSpec(Path("none"), "none", i, count, i, i + 1) for i in range(count))


class ScriptedExecutor:
    """A stage that passes steps on; as the last one it answers from a script.

    Args:
        spec: Which stage it plays.
        script: Where the last stage's tokens come from.
        on_load: Called by :meth:`load`; what it raises is the stage's failure to load.
        on_step: Called with each step before it runs; it may raise, or wait.

    Attributes:
        steps: All that it was given, in order.
        rows: The requests of each batch, by handle.
        closed: How often :meth:`close` was called.
    """

    def __init__(
        self,
        spec: StageSpec,
        script: Script = count_up,
        *,
        on_load: Callable[[], None] = lambda: None,
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self.spec = spec
        self.steps: list[Step] = []
        self.rows: dict[int, list[int]] = {}
        self.closed = 0
        self._script = script
        self._on_load, self._on_step = on_load, on_step
        self._made: dict[int, int] = {}
        self._asking: set[int] = set()

    def load(self, progress: Progress) -> int:
        self._on_load()
        progress(1, 1)
        return 1

    def run(self, step: Step) -> Step | Tokens:
        self.steps.append(step)
        self._on_step(step)
        for operation in step.operations:
            self._apply(operation)
        if not self.spec.last:
            return step
        if not (step.tensors and step.sample):
            return Tokens(step.seq, step.slot)
        rows = self.rows[step.slot]
        found = tuple(SCRIPTED if row in self._asking else None for row in rows)
        tokens = tuple(map(self._next, rows))
        return Tokens(step.seq, step.slot, tokens, found if any(found) else ())

    def requests(self, step: Step) -> tuple[int, ...]:
        return tuple(self.rows.get(step.slot, ()))

    def close(self) -> None:
        self.closed += 1

    def _next(self, request: int) -> int:
        made = self._made.get(request, 0)
        self._made[request] = made + 1
        return self._script(request, made)

    def _apply(self, operation: Operation) -> None:
        rows = self.rows
        match operation:
            case New(handle, request, sampling, _, source):
                assert source is None or len(rows[source]) == 1
                rows[handle] = [request]
                if sampling.logprobs is not None:
                    self._asking.add(request)
            case Merge(handle, sources):
                rows[handle] = [row for source in sources for row in rows.pop(source)]
            case Extend(handle, source):
                rows[handle] += rows.pop(source)
            case Filter(handle, kept):
                rows[handle] = [rows[handle][row] for row in kept]
            case Extract(handle, source, row):
                rows[handle] = [rows[source][row]]
            case Copy(handle, source):
                rows[handle] = list(rows[source])
            case Release(handle):
                rows.pop(handle, None)


class DirectPipeline:
    """A :class:`mlxcel.pipeline.pipeline.Pipeline` that runs its stages at once, on no thread.

    Attributes:
        submitted: All steps, in order.
        in_flight: The number of unread answers after each submit.
    """

    def __init__(self, executors: Sequence[ScriptedExecutor], credits: int = 4) -> None:
        self.credits = credits
        self.submitted: list[Step] = []
        self.in_flight: list[int] = []
        self._executors = executors
        self._answers: deque[Tokens | StepFailed] = deque()

    def start(self, on_progress: OnProgress = lambda stage, done, total: None) -> None:
        """Nothing: there is nothing to load."""

    def submit(self, step: Step) -> None:
        self.submitted.append(step)
        self._answers.append(self._run(step))
        self.in_flight.append(len(self._answers))

    def receive(self) -> Tokens | StepFailed:
        return self._answers.popleft()

    def poll(self) -> Tokens | StepFailed | None:
        return self._answers.popleft() if self._answers else None

    def listen(self, listener: Callable[[], None]) -> None:
        """Nothing: whoever submits finds the answer there at once."""

    def stop(self) -> tuple[StageStatus, ...]:
        return tuple(StageStatus(executor.spec.index, 1, 0.0, 0.0) for executor in self._executors)

    def _run(self, step: Step) -> Tokens | StepFailed:
        message: Step | Tokens = step
        for executor in self._executors:
            assert isinstance(message, Step)
            try:
                message = executor.run(message)
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                requests = executor.requests(step)
                return StepFailed(step.seq, step.slot, executor.spec.index, requests, cause)
        assert isinstance(message, Tokens)
        return message


def scripted_pipeline(
    tokens: Mapping[int, Sequence[int]], *, stages: int = 1, credits: int = 4
) -> DirectPipeline:
    """A :class:`DirectPipeline` that answers each request with its own list of ``tokens``."""
    return DirectPipeline(
        [
            ScriptedExecutor(spec, lambda request, made: tokens[request][made])
            for spec in specs(stages)
        ],
        credits,
    )
