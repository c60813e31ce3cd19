"""A model being served: its pipeline of workers and the engine on top, through their life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import repeat
from queue import SimpleQueue
from typing import Literal, Protocol

import attrs

from mlxcel.engine.engine import Deliver, Engine, Settings
from mlxcel.engine.kv_manager import AdmissionDiagnostic, StageKVManager
from mlxcel.engine.limits import credits_for
from mlxcel.engine.model import Model
from mlxcel.engine.sequence import Output
from mlxcel.engine.slot import Request
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.errors import InternalError, MlxcelError, NeverFits, Unavailable, UsageError
from mlxcel.family.caches import worker_kind
from mlxcel.observe.live import LiveFigures
from mlxcel.pipeline.pipeline import OnProgress
from mlxcel.pipeline.report import Beat
from mlxcel.pipeline.workers import WorkerPipeline

WARM_UP = 0
"""The number of the warm-up's request; requests of clients begin at 1."""

Phase = Literal["loading", "ready", "draining", "failed", "stopped"]


@attrs.define
class StageState:
    """How far one stage is, for health reports.

    ``place`` is its node in a cluster, ``ranks`` how many share it.
    """

    stage: int
    layers: tuple[int, int]
    bytes_done: int = 0
    bytes_total: int = 0
    ready: bool = False
    place: str = ""
    ranks: int = 1


class RunModel(Protocol):
    """Runs the stages of a model, wherever they are."""

    def __call__(
        self, *, credits: int, on_progress: OnProgress
    ) -> AbstractContextManager[WorkerPipeline]:
        """The loaded pipeline; nothing is left running when the context ends.

        Args:
            credits: Steps in flight at most.
            on_progress: Told how far each stage is; what it raises ends the loading.
        """
        ...


class Service:
    """Loads a model in a thread of its own and runs requests on it.

    Args:
        model: What to serve.
        run: What runs its stages, such as :func:`mlxcel.engine.local.running`.
        settings: Of the engine.
        kv_budgets: Cache bytes of each worker, in the order of ``model.worker_specs``; None is
            unlimited.
        deliver: See :class:`Engine`.
        places: The node of each stage, in order, if they are on several.
        warm_up: Make one token before being ready, so that no client waits for first times.
        on_refusal: See :class:`Engine`.
        on_ready: Called once, in the loading thread, when requests are taken: with the seconds
            of loading and of the warm-up.
        on_end: Called once, in whichever thread, when the service has failed.

    Attributes:
        phase: Where it is in its life.
        error: Why it failed.
        stages: How far each stage is.
        live: What each stage is doing.
    """

    def __init__(
        self,
        model: Model,
        run: RunModel,
        settings: Settings,
        kv_budgets: Sequence[int | None],
        deliver: Deliver,
        *,
        places: Sequence[str] = (),
        warm_up: bool = False,
        on_refusal: Callable[[AdmissionDiagnostic], None] = lambda diagnostic: None,
        on_ready: Callable[[float, float], None] = lambda loading, warm_up: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.settings = attrs.evolve(settings, limits=settings.limits.fitting(model.batching))
        self.phase: Phase = "loading"
        self.error: MlxcelError | None = None
        self.stages = [
            StageState(
                stage.stage_index,
                (stage.layer_range.start, stage.layer_range.stop),
                place=place,
                ranks=model.tensor.size,
            )
            for stage, place in zip(model.plan.stages, places or repeat(""), strict=False)
        ]
        self.managers = kv_managers(model, settings, kv_budgets)
        self.live = LiveFigures(len(self.stages))
        self._run = run
        self._deliver = deliver
        self._warm_up = warm_up
        self._warm: SimpleQueue[Output] = SimpleQueue()
        self._stopping = False
        self._lock = threading.Lock()  # of the phase
        self._on_refusal = on_refusal
        self._on_ready = on_ready
        self._on_end = on_end
        self._pipeline: WorkerPipeline | None = None
        self._engine: Engine | None = None
        self._stack = ExitStack()
        self._loader = threading.Thread(target=self._load, name="mlxcel-load", daemon=True)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def vocab_size(self) -> int | None:
        """Tokens that the model knows, if config.json says."""
        size = self.model.checkpoint.config.get("vocab_size")
        return size if isinstance(size, int) else None

    @property
    def context_size(self) -> int | None:
        """See :attr:`mlxcel.engine.model.Model.context_size`."""
        return self.model.context_size

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return self._engine.waiting if self._engine is not None else 0

    @property
    def active(self) -> int:
        """Requests that hold a place."""
        return self._engine.active if self._engine is not None else 0

    def start(self) -> None:
        """Begin to load; :attr:`phase` says how it goes."""
        self._loader.start()

    def submit_all(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none; see :meth:`Engine.submit_all`.

        Raises:
            Unavailable: The model is still loading, or the service has ended.
            QueueFull, TooManyAtOnce, NeverFits: As the engine says.
        """
        if self._engine is None or self.phase != "ready":
            reason = {
                "loading": "The model is still loading.",
                "failed": f"The server has failed: {self.error}",
            }
            raise Unavailable(reason.get(self.phase, "The server is shutting down."), 2.0)
        self._engine.submit_all(requests)

    def cancel(self, index: int) -> None:
        """End a request early."""
        if self._engine is not None:
            self._engine.cancel(index)

    def stop(self, *, drain: float = 0.0) -> None:
        """Let running requests finish for ``drain`` seconds, then end everything.

        A model that still loads or warms up is given up. Called again, from any thread, it
        hurries. Stages are not waited for if they have steps of unfinished requests, after a
        failure, or in a hurry.
        """
        with self._lock:
            hurried, self._stopping = self._stopping, True
            loading = self.phase == "loading"
            if self.phase in ("loading", "ready"):
                self.phase = "draining"
        if loading and self._engine is not None:
            self._engine.stop()  # the loader waits for its warm-up
        if self._loader.ident is not None:
            self._loader.join()
        at_rest = self._engine is None or self._engine.stop(drain=drain)
        if hurried and self._pipeline is not None:
            with suppress(MlxcelError):
                self._pipeline.stop(drain=False)
        # Stages may be in a step that nobody waits for any more, for as long as --pp-timeout.
        error = self.error or (None if at_rest else Unavailable("The server was shut down."))
        if error is None:
            self._stack.close()
        else:
            self._stack.__exit__(type(error), error, None)
        with self._lock:
            if self.phase != "failed":
                self.phase = "stopped"

    def _load(self) -> None:
        try:
            began = time.monotonic()
            pipeline = self._stack.enter_context(
                self._run(
                    credits=credits_of(self.model, self.settings),
                    on_progress=self._on_progress,
                )
            )
            loaded = time.monotonic()
            self._pipeline = pipeline
            pipeline.reports.on_beat = self._on_beat
            for state in self.stages:
                state.ready = True
            engine = Engine(
                pipeline,
                self.managers,
                self.model.tokenizer,
                self.settings,
                self._hear,
                self._on_refusal,
                self._fail,
                self.model.cache_kinds,
            )
            engine.start()
            self._engine = engine  # from here on stop() ends it; what was stopped before is seen
            if self._warm_up and not self._stopping:
                self._make_one_token(engine)
            with self._lock:
                ready = self.phase == "loading"
                if ready:
                    self.phase = "ready"
            if ready:
                self._on_ready(loaded - began, time.monotonic() - loaded)
        except MlxcelError as error:
            self._fail(error)
        except Exception as error:
            # Whoever waits for the model must hear of a bug too.
            self._fail(
                InternalError("the loading of the model", f"{type(error).__name__}: {error}")
            )
            raise

    def _make_one_token(self, engine: Engine) -> None:
        try:
            engine.submit(Request(WARM_UP, (0,), 1))
        except NeverFits as never:
            raise UsageError(
                f"A stage lacks the cache memory for a single token: {never.diagnostic}.",
                "Give it more with --kv-cache-budget, or use more stages.",
            ) from never
        if (error := self._warm.get().error) is not None:
            raise error

    def _hear(self, outputs: list[Output]) -> None:
        """Nobody else can have submitted anything before the warm-up is over."""
        for output in outputs:
            if output.request == WARM_UP:
                self._warm.put(output)
                return
        self._deliver(outputs)

    def _on_beat(self, beat: Beat) -> None:
        self.live.beat(beat)
        engine = len(self.stages)
        if beat.stage == engine - 1 and self._pipeline is not None:
            self.live.hops(engine, self._pipeline.take_hops())

    def _on_progress(self, stage: int, done: int, total: int) -> None:
        self.stages[stage].bytes_done, self.stages[stage].bytes_total = done, total
        if self._stopping:
            raise Unavailable("The server was shut down.")

    def _fail(self, error: MlxcelError) -> None:
        """What breaks while the service is being stopped is no failure of it."""
        with self._lock:
            if self._stopping:
                return
            self.error, self.phase = error, "failed"
        self._on_end()


def credits_of(model: Model, settings: Settings) -> int:
    """Steps in flight at most when ``model`` is served, wherever its stages are."""
    return credits_for(len(model.plan.stages), settings.limits.fitting(model.batching))


def kv_managers(
    model: Model, settings: Settings, budgets: Sequence[int | None]
) -> list[StageKVManager]:
    """What keeps the caches of each worker within its budget.

    Args:
        budgets: Of each of the model's workers, in the order of ``model.worker_specs``.
    """
    ranks, managers = model.tensor.size, []
    for spec, budget in zip(model.worker_specs, budgets, strict=True):
        stage = model.plan.stages[spec.index]
        layers = (*stage.mirrors, *stage.layer_range)
        managers.append(
            StageKVManager(
                spec.index,
                [worker_kind(model.cache_kinds[n], len(spec.ranks), ranks) for n in layers],
                budget,
                itemsize=model.activation_bytes,
                chunk=settings.limits.chunk,
                rank=spec.rank,
            )
        )
    return managers
