"""A model being served, from loading to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxcel.engine.engine import Settings
from mlxcel.engine.limits import Limits
from mlxcel.engine.local import open_model, running
from mlxcel.engine.model import Model
from mlxcel.engine.sequence import Output
from mlxcel.engine.service import Service, credits_of
from mlxcel.engine.slot import Request
from mlxcel.engine.started import started
from mlxcel.errors import DeadlineError, InternalError, Unavailable, UsageError
from mlxcel.family.batching import Batching
from mlxcel.pipeline.pipeline import OnProgress
from mlxcel.pipeline.report import Failed
from mlxcel.pipeline.step import Step
from mlxcel.pipeline.threads import ThreadPipeline
from mlxcel.plugins import Plugins
from mlxcel.testing.doubles import ScriptedExecutor

WAIT = 60.0


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Model:
    return open_model(tiny("llama"), Plugins.discover(environ={}), size=2)


class Listener:
    """Makes services, and hears what they say."""

    def __init__(self, model: Model) -> None:
        self.outputs: list[Output] = []
        self.finished = threading.Event()
        self.ended = threading.Event()
        self._model = model

    def service(self, **options: Any) -> Service:
        run = options.pop("run", partial(running, self._model, timeout=WAIT))
        budgets = options.pop("kv_budgets", [1 << 30, 1 << 30])
        return Service(
            self._model, run, Settings(), budgets, self._hear, on_end=self.ended.set, **options
        )

    def _hear(self, outputs: list[Output]) -> None:
        self.outputs += outputs
        if outputs[-1].finish_reason is not None:
            self.finished.set()


class Gate:
    """Holds every step up until it is opened.

    Attributes:
        reached: Set when a step is held up.
        stopped: For each stop of the pipeline, whether steps were waited for.
    """

    def __init__(self, model: Model) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.stopped: list[bool] = []
        self._model = model

    @contextmanager
    def run(self, *, credits: int, on_progress: OnProgress) -> Iterator[ThreadPipeline]:
        """See :class:`mlxcel.engine.service.RunModel`; its stages have no model."""
        pipeline = ThreadPipeline(
            self._model.specs,
            lambda spec: ScriptedExecutor(spec, on_step=self._wait),
            credits=credits,
            timeout=WAIT,
        )
        stop = pipeline.stop

        def watched(*, drain: bool = True) -> Any:
            self.stopped.append(drain)
            self.open.set()
            return stop(drain=drain)

        pipeline.stop = watched  # type: ignore[method-assign]
        with started(pipeline, self._model, on_progress):
            yield pipeline

    def _wait(self, step: Step) -> None:
        self.reached.set()
        assert self.open.wait(WAIT)


def wait_until_loaded(service: Service) -> None:
    service._loader.join(WAIT)
    assert not service._loader.is_alive()


def test_a_prompt_is_remembered(model: Model) -> None:
    """The second prompt that begins like the first one says how much was known already."""
    listener = Listener(model)
    service = listener.service()
    service.start()
    wait_until_loaded(service)
    beginning = tuple(range(1, 41))
    for index, prompt in enumerate(((*beginning, 7), (*beginning, 8, 9)), start=1):
        listener.finished.clear()
        service.submit_all([Request(index, prompt, 2, ignore_end=True)])
        assert listener.finished.wait(WAIT)
    ends = [output for output in listener.outputs if output.finish_reason]
    assert [output.cached for output in ends] == [0, 40]
    service.stop()


def test_before_during_and_after(model: Model) -> None:
    """Requests are taken between loading and the end, and at no other time."""
    listener = Listener(model)
    times: list[tuple[float, float]] = []
    service = listener.service(warm_up=True, on_ready=lambda *seconds: times.append(seconds))
    with pytest.raises(Unavailable, match="loading"):
        service.submit_all([Request(1, (1, 2), 3)])
    service.start()
    wait_until_loaded(service)
    assert service.phase == "ready"
    assert len(times) == 1 and min(times[0]) > 0, "seconds of loading and of the warm-up"
    assert all(stage.ready for stage in service.stages)
    assert all(stage.bytes_done == stage.bytes_total > 0 for stage in service.stages)
    assert listener.outputs == [], "nobody hears of the warm-up"
    service.submit_all([Request(1, (1, 2), 3)])
    assert listener.finished.wait(WAIT)
    assert {output.request for output in listener.outputs} == {1}
    service.stop()
    service.stop()
    assert service.phase == "stopped"
    with pytest.raises(Unavailable, match="shutting down"):
        service.submit_all([Request(2, (1, 2), 3)])
    assert not listener.ended.is_set()


def test_a_warm_up_that_fails(model: Model) -> None:
    """A stage without room for one token is found before any client is."""
    listener = Listener(model)
    service = listener.service(warm_up=True, kv_budgets=[1, 1])
    service.start()
    assert listener.ended.wait(WAIT)
    assert service.phase == "failed"
    assert isinstance(service.error, UsageError)
    service.stop()
    assert service.phase == "failed"


def test_loading_is_given_up(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped while it loads, a service ends quietly; it has not failed."""
    listener = Listener(model)
    service = listener.service()
    reached, go = threading.Event(), threading.Event()
    told = service._on_progress

    def slow(stage: int, done: int, total: int) -> None:
        reached.set()
        assert go.wait(WAIT)
        told(stage, done, total)

    monkeypatch.setattr(service, "_on_progress", slow)
    service.start()
    assert reached.wait(WAIT)
    stopping = threading.Thread(target=service.stop)
    stopping.start()
    while service.phase != "draining":
        pass
    go.set()
    stopping.join(WAIT)
    assert (service.phase, service.error) == ("stopped", None)
    assert not listener.ended.is_set()


@pytest.mark.parametrize("times", [1, 2])
def test_a_warm_up_is_given_up(model: Model, times: int) -> None:
    """Stopped while it warms up, a service waits for no stage and has not failed."""
    listener, gate = Listener(model), Gate(model)
    service = listener.service(run=gate.run, warm_up=True)
    service.start()
    assert gate.reached.wait(WAIT)
    stopping = [threading.Thread(target=service.stop) for _ in range(times)]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join(WAIT / 4)
    try:
        assert not any(thread.is_alive() for thread in stopping), "they wait for the warm-up"
    finally:
        gate.open.set()
    assert (service.phase, service.error) == ("stopped", None)
    assert not any(gate.stopped)
    assert not listener.ended.is_set()


def test_what_breaks_while_stopping_is_no_failure(model: Model) -> None:
    """A stage that goes away while the service is being stopped does not make it fail."""
    listener, gate = Listener(model), Gate(model)
    service = listener.service(run=gate.run, warm_up=True)
    service.start()
    assert gate.reached.wait(WAIT)
    service._stopping = True  # stop() has begun, and has not reached the engine yet
    assert service._pipeline is not None
    service._pipeline.reports.put(Failed(1, ZeroDivisionError("gone")))
    service._pipeline._links[-1].close("stage 1 has failed")  # type: ignore[attr-defined]
    wait_until_loaded(service)
    service.stop()
    assert (service.phase, service.error) == ("stopped", None)
    assert not listener.ended.is_set()


@pytest.mark.parametrize("unfinished", [True, False])
def test_steps_are_waited_for_only_at_rest(model: Model, unfinished: bool) -> None:
    """When the drain is over, stages are given up if they still have steps, and only then."""
    listener, gate = Listener(model), Gate(model)
    service = listener.service(run=gate.run)
    service.start()
    wait_until_loaded(service)
    if unfinished:
        service.submit_all([Request(1, (1, 2), 3)])
        assert gate.reached.wait(WAIT)
    service.stop(drain=0)
    assert service.phase == "stopped"
    assert gate.stopped == [not unfinished]


def test_a_bug_while_loading_is_a_failure(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong while loading, the service does not load for ever."""

    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("a bug")

    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    listener = Listener(model)
    service = listener.service(run=broken)
    service.start()
    assert listener.ended.wait(WAIT)
    wait_until_loaded(service)
    assert service.phase == "failed"
    assert isinstance(service.error, InternalError)
    assert "ZeroDivisionError: a bug" in str(service.error)
    assert len(seen) == 1


def test_stages_are_given_up_after_a_failure(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the engine has failed, a stage may hang: its last step is not waited for."""
    drained: list[bool] = []
    stop = ThreadPipeline.stop

    def watched(self: ThreadPipeline, *, drain: bool = True) -> Any:
        drained.append(drain)
        return stop(self, drain=drain)

    monkeypatch.setattr(ThreadPipeline, "stop", watched)
    listener = Listener(model)
    service = listener.service()
    service.start()
    wait_until_loaded(service)
    service._fail(DeadlineError("stage 1", "a step's result", 1.0, "Wait."))
    service.stop()
    assert service.phase == "failed"
    assert drained == [False]


def test_credits_of_a_model_that_cannot_batch(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs the stages allows as many steps as the engine may have in flight."""
    monkeypatch.setattr(Model, "batching", Batching.SINGLE)
    settings = Settings(Limits(parallel=9))
    service = Service(model, partial(running, model, timeout=WAIT), settings, [None, None], print)
    service.start()
    wait_until_loaded(service)
    try:
        assert service._pipeline is not None and service._engine is not None
        assert service._engine._scheduler.credits == service._pipeline.credits
        assert service._pipeline.credits == credits_of(model, settings) == 9 + 4 + 1
    finally:
        service.stop()


def test_never_started(model: Model) -> None:
    """A service that never began can be stopped."""
    service = Listener(model).service()
    service.stop()
    assert service.phase == "stopped"
