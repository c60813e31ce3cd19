"""What a bench runs: mlx-lm in a process of its own, and mlxcel's pipelines."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import attrs

from mlxcel.bench.timing import Timing
from mlxcel.engine.generation import Generation
from mlxcel.engine.local import Workers, open_model, running
from mlxcel.engine.slot import Request, credits_for, micro_batch_size
from mlxcel.errors import DeadlineError, WorkerDied
from mlxcel.pipeline.pipeline import Pipeline
from mlxcel.plugins import Plugins
from mlxcel.stage.blas import choose_blas
from mlxcel.tensor.options import TensorParallel

TIMEOUT = 600.0

Prompts = Sequence[Sequence[int]]


class Subject(Protocol):
    """Something that can be timed, loaded and at rest between its runs."""

    def run(self, prompts: Prompts, tokens: int) -> list[Timing]:
        """Make ``tokens`` tokens for each of ``prompts``."""
        ...


@attrs.frozen
class Reference:
    """A process that runs mlx-lm; ``batch`` for its BatchGenerator, else one by one."""

    process: subprocess.Popen[str]
    batch: bool

    def run(self, prompts: Prompts, tokens: int) -> list[Timing]:
        task = {"prompts": [list(p) for p in prompts], "tokens": tokens, "batch": self.batch}
        self.send(task)
        return self.receive()

    def send(self, task: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def receive(self) -> list[Timing]:
        return [Timing(**fields) for fields in json.loads(_line(self.process))]


@attrs.frozen
class Copies:
    """Independent copies side by side, each with one prompt: what the cores can do at most."""

    copies: tuple[Reference, ...]

    def run(self, prompts: Prompts, tokens: int) -> list[Timing]:
        task = {"prompts": [list(prompts[0])], "tokens": tokens, "batch": False}
        for copy in self.copies:
            copy.send(task)
        return [timing for copy in self.copies for timing in copy.receive()]


@attrs.frozen
class Staged:
    """mlxcel's own pipeline; ``rows`` a slot (None: as many slots as stages)."""

    pipeline: Pipeline
    stages: int
    rows: int | None
    chunk: int

    def run(self, prompts: Prompts, tokens: int) -> list[Timing]:
        requests = [Request(i, tuple(prompt), tokens) for i, prompt in enumerate(prompts)]
        generation = Generation(
            self.pipeline,
            requests,
            end_tokens=(),
            rows=micro_batch_size(len(prompts), self.stages, self.rows),
            chunk=self.chunk,
        )
        times: dict[int, list[float]] = {request.index: [] for request in requests}
        for token in generation:
            times[token.index].append(time.perf_counter())
        return [
            Timing(generation.progress[index].started, tuple(arrived))
            for index, arrived in times.items()
        ]


@contextmanager
def reference(folder: Path, *, batch: bool = False) -> Iterator[Reference]:
    """mlx-lm with the model of ``folder``, as the wheel ships it: its BLAS, stored weights."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "mlxcel.bench.reference", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            _line(process)
            yield Reference(process, batch)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def staged(
    folder: Path,
    *,
    layers: str | None = None,
    size: int | None = None,
    workers: Workers = "process",
    blas: str = "wheel",
    weights: str = "quantized",
    rows: int | None = None,
    chunk: int = 512,
    sequences: int = 8,
    ranks: int = 1,
    collectives: str = "transport",
) -> Iterator[Staged]:
    """A loaded pipeline; ``sequences`` is the largest number of prompts it will be given.

    With several ``ranks`` each of them is a process, which reaches the others by ``collectives``.
    """
    choice = choose_blas(blas, workers=workers)
    model = open_model(
        folder,
        Plugins.discover(),
        layers=layers,
        size=size,
        by="time",
        weights=weights,
        fast_blas=choice.fast,
        tensor=TensorParallel(ranks),
        apart=ranks > 1,
    )
    stages = len(model.plan.stages)
    with running(
        model,
        credits=credits_for(sequences, stages, rows or 1),
        timeout=TIMEOUT,
        workers=workers,
        environment=choice.environment,
        collectives=collectives,
    ) as pipeline:
        yield Staged(pipeline, stages, rows, chunk)


def _line(process: subprocess.Popen[str]) -> str:
    """The next line that ``process`` writes.

    Raises:
        DeadlineError: It wrote none in time.
        WorkerDied: It ended instead.
    """
    assert process.stdout is not None
    timer = threading.Timer(TIMEOUT, process.kill)
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    if line:
        return line
    if timer.finished.is_set() and process.wait(10) < 0:
        raise DeadlineError("mlx-lm", "a run of the bench", TIMEOUT, "Use a smaller model.")
    raise WorkerDied(0, process.pid, f"exit code {process.wait(10)}")
