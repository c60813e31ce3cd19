"""What a step costs the whole server, up to the last byte in the last client's socket.

The engine runs on stages that cost nothing, behind the real application on real sockets; the
clients are another process, which only reads. A step's answer waits until the clients have
read all events of the one before. So no work overlaps with the next step's, as it may when
stages take their time, and the time of a step is the longest that it can be.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import attrs
from aiohttp import web

from mlxcel.bench.null_pipeline import NullPipeline
from mlxcel.engine.engine import Deliver, Engine, Settings
from mlxcel.engine.kv_manager import AdmissionDiagnostic, StageKVManager
from mlxcel.engine.limits import Limits, credits_for
from mlxcel.engine.service import Phase, StageState
from mlxcel.engine.slot import Request
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.errors import DeadlineError, MlxcelError
from mlxcel.observe.live import LiveFigures
from mlxcel.server import Options, create_app
from mlxcel.server.run import make_runner

PATH = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 1_000_000, "ignore_eos": True, "stream": True}
READ_COUNT = struct.Struct("<I")
SECONDS = 60.0
WARM_UP = 50
STEPS = 400


@attrs.frozen
class StepCost:
    """Milliseconds of a step: of all threads of the server's process, and by the clock."""

    cpu: float
    wall: float


class Pace:
    """Lets an answer through when all that came before it has been read; takes the time.

    Args:
        sequences: The tokens of a step that counts.
        done: Called when enough of them were timed.
    """

    def __init__(self, sequences: int, done: Callable[[], None]) -> None:
        self.readings: list[tuple[float, float]] = []
        self.read_counts = -1
        self._sequences = sequences
        self._done = done
        self._full = 0
        self._unread = 0
        self._own = 0.0  # CPU seconds of the bench itself

    def __call__(self, tokens: int) -> None:
        """In the engine's thread.

        Raises:
            DeadlineError: The clients did not read what they should have got.
        """
        began = time.thread_time()
        while self._unread > 0:
            self._unread -= self._read()
        self._unread = tokens
        self._own += time.thread_time() - began
        if tokens == self._sequences:
            self._full += 1
            if self._full in (WARM_UP, WARM_UP + STEPS):
                self.readings.append((time.process_time() - self._own, time.perf_counter()))
            if len(self.readings) == 2:
                self._done()

    @property
    def cost(self) -> StepCost:
        """Of the steps between the two readings."""
        (cpu, wall), (cpu_end, wall_end) = self.readings[:2]
        return StepCost(1e3 * (cpu_end - cpu) / STEPS, 1e3 * (wall_end - wall) / STEPS)

    def _read(self) -> int:
        """How many events the clients have read since the last call; waits for some."""
        ready, _, _ = select.select([self.read_counts], [], [], SECONDS)
        if not ready:
            raise DeadlineError("the clients", "events", SECONDS, "This is a bug in the bench.")
        data = os.read(self.read_counts, 1024 * READ_COUNT.size)
        if not data:  # they have gone, for all is measured
            return self._unread
        return sum(count for (count,) in READ_COUNT.iter_unpack(data))


class NullBackend:
    """A :class:`mlxcel.server.backend.Backend` without a model."""

    managers: Sequence[StageKVManager] = ()
    vocab_size: int | None = None
    context_size: int | None = None

    def __init__(
        self,
        pipeline: NullPipeline,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        deliver: Deliver,
        on_refusal: Callable[[AdmissionDiagnostic], None],
        on_end: Callable[[], None],
    ) -> None:
        self.phase: Phase = "ready"
        self.error: MlxcelError | None = None
        self.stages = [StageState(i, (i, i + 1)) for i in range(pipeline.count)]
        self.live = LiveFigures(pipeline.count)
        self.tokenizer = tokenizer
        self._engine = Engine(pipeline, [], tokenizer, Settings(limits), deliver, on_refusal)

    @property
    def waiting(self) -> int:
        return self._engine.waiting

    @property
    def active(self) -> int:
        return self._engine.active

    def start(self) -> None:
        self._engine.start()

    def submit_all(self, requests: Sequence[Request]) -> None:
        self._engine.submit_all(requests)

    def cancel(self, index: int) -> None:
        self._engine.cancel(index)

    def stop(self, *, drain: float = 0.0) -> None:
        self._engine.stop()


def step_cost(tokenizer: Tokenizer, stages: int, sequences: int) -> StepCost:
    """The mean over :data:`STEPS` steps of ``sequences`` tokens, each with an event of its own."""
    return asyncio.run(_step_cost(tokenizer, stages, sequences))


async def _step_cost(tokenizer: Tokenizer, stages: int, sequences: int) -> StepCost:
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def on_done() -> None:
        loop.call_soon_threadsafe(done.set)

    pace = Pace(sequences, on_done)
    limits = Limits(sequences, sequences, micro_batch=sequences)
    tokens = visible_tokens(tokenizer)
    pipeline = NullPipeline(stages, credits_for(stages, limits), tokens, pace)
    app = create_app(partial(NullBackend, pipeline, tokenizer, limits), Options("null"))
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    command = [sys.executable, "-P", "-m", "mlxcel.bench.readers", str(port), str(sequences)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as clients:
        assert clients.stdin is not None and clients.stdout is not None
        pace.read_counts = clients.stdout.fileno()
        try:
            clients.stdin.write(json.dumps(BODY).encode())
            clients.stdin.close()
            async with asyncio.timeout(2 * SECONDS):
                await done.wait()
        finally:
            clients.kill()
            await runner.cleanup()
    return pace.cost


def visible_tokens(tokenizer: Tokenizer, most: int = 200) -> list[int]:
    """Token ids each of which makes some text by itself, so that each makes an event."""
    found = []
    for token in range(tokenizer.backend.get_vocab_size()):
        text = tokenizer.decode([token])
        if text.isascii() and text.strip():
            found.append(token)
            if len(found) == most:
                break
    return found
