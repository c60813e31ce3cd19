"""A pipeline whose stages are threads of this process.

Made for parity and debugging: the threads share one MLX, so two of them reach about 1.5
times the speed of one. Throughput wants a process for each stage.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from mlxcel.errors import DeadlineError
from mlxcel.pipeline.link import Inbox, Link, Outbox, memory_link
from mlxcel.pipeline.worker import run_stage
from mlxcel.pipeline.workers import MORE_TIME, WorkerPipeline
from mlxcel.stage.contract import StageExecutor, StageSpec


class ThreadPipeline(WorkerPipeline):
    """One thread per stage, in-memory links between them.

    Args:
        specs: The stages, in order.
        build: Makes the executor of a spec; called in the stage's own thread.
        credits: Steps in flight at most; the capacity of every link.
        timeout: Seconds any one wait may last.
        wrap: Puts something around each link, such as the wire format.
    """

    def __init__(
        self,
        specs: Sequence[StageSpec],
        build: Callable[[StageSpec], StageExecutor],
        *,
        credits: int,
        timeout: float,
        wrap: Callable[[Link], Link] = lambda link: link,
    ) -> None:
        super().__init__(len(specs), credits=credits, timeout=timeout)
        names = ["engine", *(f"stage {spec.index}" for spec in specs), "engine"]
        # One more place than credits, so that the final Stop always fits.
        self._links = [
            wrap(memory_link(credits + 1, f"{a} to {b}")) for a, b in itertools.pairwise(names)
        ]
        self._threads = [
            threading.Thread(
                target=run_stage,
                args=(spec, build, *self._links[i : i + 2], self.reports.put),
                name=f"mlxcel-stage-{spec.index}",
                daemon=True,  # joined by stop(); one that hangs must not keep the process alive
            )
            for i, spec in enumerate(specs)
        ]

    def _launch(self) -> tuple[Outbox, Inbox]:
        for thread in self._threads:
            thread.start()
        return self._links[0], self._links[-1]

    def _join(self, deadline: float) -> None:
        began = time.monotonic()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                waited = round(time.monotonic() - began, 1)
                raise DeadlineError(thread.name, "its last step to end", waited, MORE_TIME)
