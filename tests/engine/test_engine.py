"""The engine's thread: outputs reach everybody, and every end is told."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

from mlxcel.engine.engine import Engine, Settings
from mlxcel.engine.generation import Generation
from mlxcel.engine.kv_manager import AdmissionDiagnostic, RejectionReason, StageKVManager
from mlxcel.engine.limits import Limits, credits_for
from mlxcel.engine.local import open_model, running
from mlxcel.engine.sequence import Output
from mlxcel.engine.slot import Request
from mlxcel.errors import (
    DeadlineError,
    InternalError,
    MlxcelError,
    NeverFits,
    QueueFull,
    StageError,
    TooManyAtOnce,
    Unavailable,
)
from mlxcel.family.caches import KVCacheKind
from mlxcel.pipeline.operations import Sampling
from mlxcel.pipeline.step import Step
from mlxcel.pipeline.threads import ThreadPipeline
from mlxcel.plugins import Plugins
from mlxcel.stage.contract import StageSpec
from mlxcel.testing.doubles import ScriptedExecutor, specs
from mlxcel.testing.quick import quick

WAIT = 60.0
FAMILIES = ("llama", "gemma4", "qwen3_5", "jamba", "deepseek_v3", "llama4")


class Client:
    """Collects outputs; :meth:`wait` until so many requests have ended."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.ends: dict[int, Output] = {}
        self.rounds = 0
        self._changed = threading.Condition()

    def deliver(self, outputs: list[Output]) -> None:
        with self._changed:
            self.rounds += 1
            for output in outputs:
                assert output.request not in self.ends, "nothing comes after the end"
                self.tokens.setdefault(output.request, []).extend(output.tokens)
                self.text[output.request] = self.text.get(output.request, "") + output.text
                if output.finish_reason is not None:
                    self.ends[output.request] = output
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ends) >= count, WAIT), self.ends


@contextmanager
def scripted(
    stages: int = 2,
    settings: Settings | None = None,
    *,
    timeout: float = WAIT,
    managers: list[StageKVManager] | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Iterator[tuple[Engine, Client, list[ScriptedExecutor]]]:
    """An engine on threads without a model."""
    settings = settings or Settings()
    executors = [ScriptedExecutor(spec, on_step=on_step) for spec in specs(stages)]

    def build(spec: StageSpec) -> ScriptedExecutor:
        return executors[spec.index]

    pipeline = ThreadPipeline(
        specs(stages), build, credits=credits_for(stages, settings.limits), timeout=timeout
    )
    client = Client()
    pipeline.start()
    engine = Engine(pipeline, managers or [], None, settings, client.deliver)
    engine.start()
    try:
        yield engine, client, executors
    finally:
        engine.stop()
        pipeline.stop(drain=False)


def request(index: int, prompt: int = 3, tokens: int = 4) -> Request:
    return Request(index, tuple(range(1, prompt + 1)), tokens)


def test_everybody_gets_their_tokens() -> None:
    """Requests from several threads are answered each with its own tokens."""
    with scripted(3, Settings(Limits(chunk=4))) as (engine, client, executors):
        threads = [
            threading.Thread(
                target=lambda k=k: [engine.submit(request(i)) for i in range(k, 60, 4)]
            )
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.wait(60)
        assert client.tokens == {i: [1000 * i + made for made in range(4)] for i in range(60)}
        engine.stop(drain=WAIT)
        assert all(executor.rows == {} for executor in executors)


def test_one_delivery_a_round() -> None:
    """All tokens of a step are delivered in one call, not one call each."""
    with scripted(1, Settings(Limits(chunk=64))) as (engine, client, _):
        gate = threading.Event()
        engine._deliver = lambda outputs: (gate.wait(WAIT), client.deliver(outputs))[1]  # type: ignore[assignment,func-returns-value]
        for index in range(16):
            engine.submit(request(index, tokens=8))
        gate.set()
        client.wait(16)
        assert client.rounds < 16 * 8 / 2


def test_cancelled_requests_end_at_once() -> None:
    """A cancel is answered even while the pipeline is stuck in a step."""
    gate = threading.Event()
    with scripted(1, on_step=lambda step: gate.wait(WAIT) and None) as (engine, client, executors):
        engine.submit(request(0, tokens=100_000))
        engine.cancel(0)
        client.wait(1)
        assert client.ends[0].finish_reason == "cancelled"
        gate.set()
        engine.stop(drain=WAIT)
        assert executors[0].rows == {}


def test_more_than_the_queue_holds_is_refused() -> None:
    """Beyond --max-queue-depth a request is refused, not queued."""
    gate = threading.Event()
    settings = Settings(Limits(parallel=1), queue_depth=2)
    with scripted(1, settings, on_step=lambda step: gate.wait(WAIT) and None) as (
        engine,
        client,
        _,
    ):
        engine.submit(request(0))
        while engine.active == 0:
            pass  # until it has left the queue for its place
        engine.submit(request(1))
        engine.submit(request(2))
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            engine.submit(request(3))
        gate.set()
        client.wait(3)


def test_requests_that_belong_together() -> None:
    """Several are queued all or none, also where only the last of them could never fit."""
    gate = threading.Event()
    settings = Settings(Limits(parallel=3), queue_depth=2)
    manager = StageKVManager(0, [KVCacheKind(1, 8, 8)], 100_000, itemsize=4, chunk=64)
    wait = scripted(1, settings, managers=[manager], on_step=lambda step: gate.wait(WAIT) and None)
    with wait as (engine, client, _):
        with pytest.raises(NeverFits):
            engine.submit_all([request(0), request(1, tokens=1_000_000)])
        with pytest.raises(TooManyAtOnce, match="4 answers"):
            engine.submit_all([request(index) for index in range(4)])
        assert engine.waiting == 0
        engine.submit_all([request(index) for index in range(3)])  # a place for each
        while engine.waiting:
            pass  # until they have left the queue for their places
        engine.submit(request(3))
        with pytest.raises(QueueFull, match="1 requests are waiting already, and 2 more"):
            engine.submit_all([request(4), request(5)])
        assert engine.waiting == 1
        gate.set()
        client.wait(4)


def test_what_can_never_fit_is_refused_at_once() -> None:
    """A request larger than a stage's whole budget is refused with the numbers, and counted."""
    manager = StageKVManager(1, [KVCacheKind(1, 8, 8)], 100_000, itemsize=4, chunk=64)
    refusals: list[AdmissionDiagnostic] = []
    with scripted(2, managers=[manager]) as (engine, _, _):
        engine._on_refusal = refusals.append
        with pytest.raises(NeverFits, match="stage 1 has 0 sequences in 0 of 100000 bytes"):
            engine.submit(request(0, tokens=1_000_000))
    assert [(one.stage_index, one.reason) for one in refusals] == [(1, RejectionReason.MEMORY)]


def test_waiting_has_a_deadline() -> None:
    """Who gets no place in time is told so, and may come again."""
    gate = threading.Event()
    settings = Settings(Limits(parallel=1), queue_timeout=0.05)
    with scripted(1, settings, on_step=lambda step: gate.wait(WAIT) and None) as (
        engine,
        client,
        _,
    ):
        engine.submit(request(0))
        engine.submit(request(1))
        client.wait(1)
        assert isinstance(client.ends[1].error, Unavailable)
        assert "No place became free within 0.05 s" in str(client.ends[1].error)
        gate.set()
        client.wait(2)


def test_draining_finishes_what_runs() -> None:
    """A draining engine refuses newcomers and finishes everybody else."""
    with scripted(2) as (engine, client, _):
        for index in range(10):
            engine.submit(request(index, tokens=50))
        engine.stop(drain=WAIT)
        assert {end.finish_reason for end in client.ends.values()} == {"length"}
        assert len(client.ends) == 10
        with pytest.raises(Unavailable, match="shutting down"):
            engine.submit(request(99))


def test_stopping_at_once_tells_everybody() -> None:
    """Without time to drain, running requests end with an error that may be retried."""
    gate = threading.Event()
    with scripted(1, on_step=lambda step: gate.wait(WAIT) and None) as (engine, client, _):
        engine.submit(request(0, tokens=1_000_000))
        engine.stop(drain=0)
        gate.set()
        assert isinstance(client.ends[0].error, Unavailable)


def test_a_dead_stage_ends_every_stream() -> None:
    """When a stage is gone, everybody is told why, and newcomers are refused."""
    deaths: list[MlxcelError] = []
    with scripted(2) as (engine, client, _):
        engine._on_death = deaths.append
        for index in range(5):
            engine.submit(request(index, tokens=1_000_000))
        engine._pipeline._links[1].close("stage 0 has failed")  # type: ignore[attr-defined]
        client.wait(5)
        assert all(end.finish_reason == "error" for end in client.ends.values())
        engine._thread.join(WAIT)
        assert len(deaths) == 1
        with pytest.raises(Unavailable):
            engine.submit(request(9))


def test_a_bug_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw ends every request with an error that asks for no second try."""
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    with scripted(1) as (engine, client, _):

        def broken() -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(engine._scheduler, "steps", broken)
        engine.submit(request(0))
        client.wait(1)
        assert isinstance(client.ends[0].error, InternalError)
        assert "ZeroDivisionError: a bug" in str(client.ends[0].error)
        engine._thread.join(WAIT)
    assert len(seen) == 1


def test_a_silent_stage_is_noticed() -> None:
    """A stage that never answers ends everything within its deadline."""
    gate = threading.Event()
    with scripted(1, timeout=0.1, on_step=lambda step: gate.wait(WAIT) and None) as (
        engine,
        client,
        _,
    ):
        engine.submit(request(0))
        client.wait(1)
        assert isinstance(client.ends[0].error, DeadlineError)
        assert "--pp-timeout" in str(client.ends[0].error)
        gate.set()


def test_a_failing_step_takes_only_its_batch(caplog: pytest.LogCaptureFixture) -> None:
    """A stage that fails one step ends that batch's requests; the next request is served."""

    def fail_on_seven(step: Step) -> None:
        if any(getattr(op, "request", None) == 7 for op in step.operations):
            raise ValueError("seven")

    with scripted(2, on_step=fail_on_seven) as (engine, client, executors):
        engine.submit(request(7))
        client.wait(1)
        assert isinstance(client.ends[7].error, StageError)
        assert "ValueError: seven" in str(client.ends[7].error)
        assert "ValueError: seven" in caplog.text, "whoever runs the server learns it too"
        engine.submit(request(8))
        client.wait(2)
        assert client.tokens[8] == [8000, 8001, 8002, 8003]
        engine.stop(drain=WAIT)
        assert all(executor.rows == {} for executor in executors)


def test_more_work_than_places_never_deadlocks() -> None:
    """Far more requests than queue places, feedback, cancels: all end, and nothing is left."""
    rng = random.Random(4)
    settings = Settings(Limits(parallel=4, batch=2, chunk=2), queue_depth=10_000)
    with scripted(4, settings) as (engine, client, executors):
        for index in range(300):
            engine.submit(request(index, rng.randint(1, 9), rng.randint(1, 9)))
            if rng.random() < 0.4:
                engine.cancel(rng.randint(0, index))
        client.wait(300)
        engine.stop(drain=WAIT)
        assert (engine.active, engine.waiting) == (0, 0)
        assert all(executor.rows == {} for executor in executors)


@pytest.mark.parametrize("name", quick(FAMILIES, ("llama", "qwen3_5")))
def test_concurrent_streams_equal_single_runs(tiny: Callable[..., Path], name: str) -> None:
    """64 streams over 3 stages, greedy and sampled, some cancelled: each as if it were alone."""
    rng = random.Random(name)
    alone = [
        Request(
            index,
            tuple(rng.randrange(250) for _ in range(rng.choice([1, 2, 5, 11, 17, 33]))),
            rng.randint(1, 12),
            Sampling(temperature=rng.choice([0.0, 0.8]), top_p=0.9, seed=index),
            ignore_end=True,
        )
        for index in range(32)
    ]
    requests = [*alone, *(attrs.evolve(one, index=one.index + 32) for one in alone)]
    model = open_model(tiny(name), Plugins.discover(), size=3)
    settings = Settings(Limits(chunk=16))
    client = Client()
    with running(model, credits=credits_for(3, settings.limits), timeout=WAIT) as pipeline:
        engine = Engine(pipeline, [], model.tokenizer, settings, client.deliver)
        engine.start()
        for one in requests:
            engine.submit(one)
            if rng.random() < 0.1:
                engine.cancel(rng.randint(0, one.index))
        client.wait(64)
        engine.stop(drain=WAIT)
        single = {
            one.index: [
                token.token
                for token in Generation(pipeline, [one], end_tokens=(), rows=1, chunk=512)
            ]
            for one in alone
        }
    for index, tokens in client.tokens.items():
        if client.ends[index].finish_reason == "length":
            assert tokens == single[index % 32], index
        else:
            assert tokens == single[index % 32][: len(tokens)], index
