"""The one thread that schedules all requests of one pipeline.

Other threads reach it through a queue; what it has to say leaves through one call a round
with everything that the round brought. It sleeps until an answer, a request or a deadline
wakes it: nothing polls.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from queue import Empty, SimpleQueue
from typing import Literal, Protocol

import attrs

from mlxcel.engine.detokenizer import StreamingDetokenizer
from mlxcel.engine.kv_manager import AdmissionDiagnostic, StageKVManager
from mlxcel.engine.limits import Limits
from mlxcel.engine.prefix_cache import PrefixCache
from mlxcel.engine.scheduler import Scheduler
from mlxcel.engine.sequence import Output, Sequence
from mlxcel.engine.slot import Request
from mlxcel.engine.stop_strings import StopStrings
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.errors import (
    DeadlineError,
    InternalError,
    LogitsError,
    MlxcelError,
    NeverFits,
    QueueFull,
    StageError,
    TooManyAtOnce,
    Unavailable,
)
from mlxcel.family.caches import CacheKind
from mlxcel.observe.limited_log import LimitedLog
from mlxcel.pipeline.step import Step, StepFailed, Tokens
from mlxcel.pipeline.workers import MORE_TIME

_log = logging.getLogger(__name__)


@attrs.frozen
class Settings:
    """How the engine runs.

    ``queue_depth`` requests may wait for a place, each for ``queue_timeout`` seconds at most.
    ``prefixes`` prompts are remembered at most; 0 switches that off.
    """

    limits: Limits = attrs.field(factory=Limits)
    queue_depth: int = 256
    queue_timeout: float = 60.0
    prefixes: int = 64


@attrs.frozen
class _Cancel:
    index: int


class EnginePipeline(Protocol):
    """What the engine needs of a pipeline; see :class:`mlxcel.pipeline.workers.WorkerPipeline`."""

    count: int
    timeout: float

    def submit(self, step: Step) -> None: ...

    def poll(self) -> Tokens | StepFailed | None: ...

    def listen(self, listener: Callable[[], None]) -> None: ...


Deliver = Callable[[list[Output]], None]
Phase = Literal["running", "draining", "stopped"]


class Engine:
    """Runs requests on a started pipeline.

    Args:
        pipeline: Started; nothing else may use it. It must have the credits of
            :attr:`Scheduler.credits`.
        managers: The cache budget of each worker.
        tokenizer: For text and end tokens; None delivers token ids only.
        settings: Limits.
        deliver: Called in the engine's thread with the outputs of one round; must not block.
        on_refusal: Told a stage's refusal to admit, for metrics, in whichever thread.
        kinds: What the model's layers keep of a sequence; without it no prompt is remembered.
        on_death: Told why the engine ended without being asked, after everybody was told.

    Attributes:
        error: Why the engine died; None while it lives.
    """

    def __init__(
        self,
        pipeline: EnginePipeline,
        managers: Collection[StageKVManager],
        tokenizer: Tokenizer | None,
        settings: Settings,
        deliver: Deliver,
        on_refusal: Callable[[AdmissionDiagnostic], None] = lambda diagnostic: None,
        on_death: Callable[[MlxcelError], None] = lambda error: None,
        kinds: Many[CacheKind | None] | None = None,
    ) -> None:
        self.error: MlxcelError | None = None
        self.phase: Phase = "running"
        self._pipeline = pipeline
        self._tokenizer = tokenizer
        self._settings = settings
        self._deliver = deliver
        self._on_refusal = on_refusal
        self._on_death = on_death
        ends = tokenizer.eos_ids if tokenizer is not None else ()
        self._scheduler = Scheduler(
            pipeline.count,
            list(managers),
            ends,
            settings.limits,
            on_refusal,
            PrefixCache(kinds, settings.prefixes) if kinds is not None else None,
        )
        self._complaints = LimitedLog(_log)
        self._commands: SimpleQueue[Sequence | _Cancel] = SimpleQueue()
        self._queued = 0
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mlxcel-engine", daemon=True)

    def start(self) -> None:
        """Begin to take requests."""
        self._pipeline.listen(self._bell.set)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue one request; see :meth:`submit_all`."""
        self.submit_all((request,))

    def submit_all(self, requests: Many[Request]) -> None:
        """Queue all of ``requests`` or none; their outputs come through ``deliver``.

        Any thread may call it. All count at once against the requests that may wait, so that
        answers that belong together never take each other's place.

        Raises:
            NeverFits: Not even an idle pipeline could hold one of them.
            TooManyAtOnce: Not even an idle engine would take so many.
            QueueFull: Too many wait already.
            Unavailable: The engine drains, or has died.
        """
        sequences = [self._sequence(request) for request in requests]
        with self._lock:
            if self.phase != "running":
                raise Unavailable(str(self.error or "The server is shutting down."))
            self._check_room(len(sequences))
            self._queued += len(sequences)
            for sequence in sequences:
                self._commands.put(sequence)
        self._bell.set()

    def _sequence(self, request: Request) -> Sequence:
        decoder = StreamingDetokenizer(self._tokenizer) if self._tokenizer is not None else None
        sequence = Sequence(request, decoder, StopStrings(request.stop), arrived=time.monotonic())
        if (diagnostic := self._scheduler.impossible(sequence)) is not None:
            self._on_refusal(diagnostic)
            raise NeverFits(str(diagnostic))
        return sequence

    def _check_room(self, asked: int) -> None:
        """Refuse more than may wait, or than find a place at once because nobody waits."""
        depth, parallel = self._settings.queue_depth, self._settings.limits.parallel
        if asked > max(depth, parallel):
            raise TooManyAtOnce(asked, depth, parallel)
        free = parallel - self._scheduler.active if self._queued == 0 else 0
        if asked > max(depth - self._queued, free):
            raise QueueFull(self._queued, asked)

    def cancel(self, index: int) -> None:
        """End a request; its last output has the finish reason ``cancelled``."""
        self._commands.put(_Cancel(index))
        self._bell.set()

    def stop(self, *, drain: float = 0.0) -> bool:
        """Take no more requests, let the running ones finish for ``drain`` seconds, then end.

        The pipeline itself is the caller's to stop.

        Returns:
            Whether the pipeline is at rest; else it still has steps, which nobody waits for.
        """
        with self._lock:
            if self.phase == "running":
                self.phase = "draining"
        self._bell.set()
        self._thread.join(drain)
        with self._lock:
            self.phase = "stopped"
        self._bell.set()
        self._thread.join()
        return self._scheduler.in_flight == 0

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return self._queued

    @property
    def active(self) -> int:
        """Requests that hold a place."""
        return self._scheduler.active

    def _run(self) -> None:
        try:
            while True:
                # Cleared before anything is looked at: what rings later wakes the sleep.
                self._bell.clear()
                self.round()
                if self._done():
                    break
                self._sleep()
            self._end(Unavailable("The server was shut down."))
        except MlxcelError as error:
            self._end(error)
        except Exception as error:
            # A fault of the engine itself must reach every client too, not just a log.
            self._end(InternalError("the engine", f"{type(error).__name__}: {error}"))
            raise

    def _done(self) -> bool:
        if self.phase == "stopped":
            return True
        return self.phase == "draining" and self._scheduler.idle and self._commands.empty()

    def round(self) -> None:
        """Take what came, send what can be sent, deliver what there is.

        The engine's thread calls it whenever something rings; a bench may call it instead.
        """
        outputs = self._take_commands()
        while (answer := self._pipeline.poll()) is not None:
            self._answered = time.monotonic()
            outputs += (found := self._scheduler.take(answer))
            self._complain(found)
        outputs += self._expire()
        waiting = len(self._scheduler.waiting)
        for step in self._scheduler.steps():
            self._pipeline.submit(step)
        with self._lock:
            self._queued -= waiting - len(self._scheduler.waiting)
        if outputs:
            self._deliver(outputs)

    def _complain(self, outputs: list[Output]) -> None:
        """Log what failed: clients are told too, but only whoever runs the model can help it."""
        for error in {output.error for output in outputs}:
            if isinstance(error, StageError | LogitsError):
                self._complaints.warning(type(error).__name__, str(error))

    def _take_commands(self) -> list[Output]:
        outputs = []
        with contextlib.suppress(Empty):
            while True:
                command = self._commands.get_nowait()
                if isinstance(command, Sequence):
                    self._scheduler.add(command)
                    continue
                waiting = len(self._scheduler.waiting)
                if (output := self._scheduler.cancel(command.index)) is not None:
                    outputs.append(output)
                with self._lock:
                    self._queued -= waiting - len(self._scheduler.waiting)
        return outputs

    def _expire(self) -> list[Output]:
        late = self._scheduler.expire(time.monotonic() - self._settings.queue_timeout)
        with self._lock:
            self._queued -= len(late)
        error = Unavailable(f"No place became free within {self._settings.queue_timeout:g} s.", 5.0)
        return [sequence.finish("error", error=error) for sequence in late]

    def _sleep(self) -> None:
        """Until the bell rings or a deadline passes.

        Raises:
            DeadlineError: A step has been in flight for longer than a stage may take.
        """
        now, timeout = time.monotonic(), self._pipeline.timeout
        waiting = self._scheduler.waiting
        expires = waiting[0].arrived + self._settings.queue_timeout - now if waiting else None
        if self._scheduler.in_flight == 0:
            self._answered = now
            self._bell.wait(expires if expires is None else max(0.0, expires))
            return
        left = self._answered + timeout - now
        wait = left if expires is None else min(left, expires)
        if not self._bell.wait(max(0.0, wait)) and wait == left:
            raise DeadlineError("the pipeline", "a step's result", timeout, MORE_TIME)

    def _end(self, error: MlxcelError) -> None:
        """Tell everybody who is left, and refuse whoever comes."""
        with self._lock:
            if self.phase == "running":
                self.error = error
            self.phase = "stopped"
        outputs = self._take_commands()
        outputs += [
            sequence.finish("error", error=error) for sequence in self._scheduler.everything()
        ]
        if outputs:
            self._deliver(outputs)
        if self.error is not None:
            self._on_death(self.error)
