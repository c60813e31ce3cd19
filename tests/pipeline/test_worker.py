"""The loop of one stage, over in-memory links and without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from mlxcel.errors import ChannelClosed, CheckpointError
from mlxcel.pipeline.link import Link, memory_link
from mlxcel.pipeline.operations import New, Sampling
from mlxcel.pipeline.report import Beat, Ended, Failed, Loaded, Loading, Report
from mlxcel.pipeline.step import Message, Step, StepFailed, Stop, Tokens
from mlxcel.pipeline.worker import run_stage
from mlxcel.stage.contract import StageSpec
from mlxcel.testing.doubles import ScriptedExecutor, specs

FIRST, LAST = specs(2)
TENSORS = {"tokens": object()}


def step(seq: int, **fields: Any) -> Step:
    return Step(seq, slot=0, **fields)


def new(request: int) -> New:
    return New(0, request, Sampling())


def serve(
    spec: StageSpec, *messages: Message, stop: bool = True, **options: Callable[..., None]
) -> tuple[ScriptedExecutor, list[Message], list[Report]]:
    """Run a stage over ``messages``; returns it, what it sent on and what it reported.

    Beats are left out: they come when time has passed.
    """
    inbox, outbox = memory_link(10, "in"), memory_link(10, "out")
    for message in messages:
        inbox.send(message)
    if stop:
        inbox.send(Stop())
    executor = ScriptedExecutor(spec, **options)
    reports: list[Report] = []
    run_stage(spec, lambda given: executor, inbox, outbox, reports.append)
    told = [report for report in reports if not isinstance(report, Beat)]
    return executor, drain(outbox), told


def drain(link: Link) -> list[Message]:
    """All that was sent over a closed link."""
    messages = []
    while True:
        try:
            messages.append(link.receive(0))
        except ChannelClosed:
            return messages


def raiser(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_stage_passes_steps_on_in_order() -> None:
    """A stage in the middle hands every step and at last the Stop to the next one."""
    steps = [step(0, operations=(new(7),)), step(1, tensors=TENSORS)]
    executor, sent, reports = serve(FIRST, *steps)
    assert executor.steps == steps
    assert sent == [*steps, Stop()]
    loading, loaded, ended = reports
    assert loading == Loading(0, 1, 1)
    assert isinstance(loaded, Loaded)
    assert loaded.bytes == 1
    assert isinstance(ended, Ended)


def test_the_last_stage_answers_every_step() -> None:
    """Each step has exactly one answer; tokens only where the step asks for them."""
    _, sent, _ = serve(
        LAST,
        step(0, operations=(new(3),), tensors=TENSORS),
        step(1, tensors=TENSORS, sample=True),
        step(2),
    )
    assert sent == [Tokens(0, 0), Tokens(1, 0, (3000,)), Tokens(2, 0), Stop()]


def test_busy_time_counts_steps_with_work_only() -> None:
    """A stage that only applied operations was never busy."""
    *_, idle = serve(FIRST, step(0, operations=(new(7),)))[2]
    assert idle == Ended(0, 0.0, None, None)
    *_, busy = serve(FIRST, step(0, tensors=TENSORS), step(1, tensors=TENSORS))[2]
    assert isinstance(busy, Ended)
    assert busy.first is not None
    assert busy.last is not None
    assert 0 < busy.busy <= busy.last - busy.first


def test_a_failing_step_is_answered_and_the_stage_goes_on() -> None:
    """StepFailed names the stage, the lost requests and the cause; the next step runs."""

    def fail_once(given: Step) -> None:
        if given.seq == 1:
            raise ValueError("broken on purpose")

    _, sent, reports = serve(
        LAST, step(0, operations=(new(7),)), step(1), step(2, tensors=TENSORS, sample=True),
        on_step=fail_once,
    )  # fmt: skip
    failed = StepFailed(1, 0, stage=1, requests=(7,), cause="ValueError: broken on purpose")
    assert sent == [Tokens(0, 0), failed, Tokens(2, 0, (7000,)), Stop()]
    assert isinstance(reports[-1], Ended)


def test_a_failure_passes_later_stages_untouched() -> None:
    """The executor of a later stage never sees a failed step."""
    failed = StepFailed(0, 0, stage=0, requests=(7,), cause="ValueError: elsewhere")
    executor, sent, _ = serve(LAST, failed)
    assert sent == [failed, Stop()]
    assert executor.steps == []


@pytest.mark.parametrize("error", [CheckpointError("f", "p.", "w."), SystemExit(0), MemoryError()])  # type: ignore[arg-type]
@pytest.mark.parametrize("where", ["build", "load"])
def test_failure_before_serving(error: BaseException, where: str) -> None:
    """A stage that cannot start reports its own error and closes both of its links."""
    inbox, outbox = memory_link(2, "in"), memory_link(2, "out")
    executor = ScriptedExecutor(FIRST, on_load=raiser(error) if where == "load" else lambda: None)

    def build(spec: StageSpec) -> ScriptedExecutor:
        if where == "build":
            raise error
        return executor

    reports: list[Report] = []
    run_stage(FIRST, build, inbox, outbox, reports.append)
    assert reports == [Failed(0, error)]
    with pytest.raises(ChannelClosed, match="stage 0 has failed"):
        inbox.send(Stop())
    with pytest.raises(ChannelClosed, match="stage 0 has failed"):
        outbox.receive(0)
    assert executor.closed == (where == "load")


def test_an_executor_that_exits_ends_its_stage() -> None:
    """SystemExit in a plugin's executor is a failure of the stage, not the end of the program."""
    error = SystemExit("from a plugin")
    executor, sent, reports = serve(FIRST, step(0), on_step=raiser(error))
    assert sent == []
    assert reports[-1] == Failed(0, error)
    assert executor.closed == 1


def test_an_executor_that_cannot_close() -> None:
    """What goes wrong while closing is reported too, and the links are closed all the same."""
    error = ValueError("cannot close")

    class Stuck(ScriptedExecutor):
        def close(self) -> None:
            raise error

    inbox, outbox = memory_link(2, "in"), memory_link(2, "out")
    inbox.send(Stop())
    reports: list[Report] = []
    run_stage(FIRST, Stuck, inbox, outbox, reports.append)
    assert reports[-1] == Failed(0, error)
    assert drain(outbox) == [Stop()]


@pytest.mark.parametrize("stop", [True, False])
def test_the_executor_is_closed_once(stop: bool) -> None:
    """A Stop and a neighbour that is gone both end the stage, its executor and its links."""
    inbox, outbox = memory_link(2, "in"), memory_link(2, "out")
    if stop:
        inbox.send(Stop())
    else:
        inbox.close("the engine is gone")
    executor = ScriptedExecutor(FIRST)
    reports: list[Report] = []
    run_stage(FIRST, lambda spec: executor, inbox, outbox, reports.append)
    assert executor.closed == 1
    cut = "" if stop else "in is closed: the engine is gone"
    assert reports[-1] == Ended(0, 0.0, None, None, cut)
    with pytest.raises(ChannelClosed):
        inbox.send(Stop())


def test_a_next_stage_that_is_gone_ends_this_one() -> None:
    """A closed outbox is no failure of the stage that notices it."""
    inbox, outbox = memory_link(2, "in"), memory_link(2, "out")
    inbox.send(step(0))
    outbox.close("stage 1 has failed")
    reports: list[Report] = []
    run_stage(FIRST, ScriptedExecutor, inbox, outbox, reports.append)
    assert isinstance(reports[-1], Ended)


def test_an_idle_stage_goes_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for work that ends without any is not an error."""
    monkeypatch.setattr("mlxcel.pipeline.worker.IDLE_SECONDS", 0.001)
    waited: list[float] = []
    quiet = memory_link(2, "in")

    class Late:
        """A link whose first waits end empty."""

        def receive(self, timeout: float) -> Message:
            waited.append(timeout)
            if len(waited) == 3:
                quiet.send(Stop())
            return quiet.receive(timeout)

        def send(self, message: Message) -> None: ...

        def close(self, reason: str | None = None) -> None: ...

    reports: list[Report] = []
    run_stage(FIRST, ScriptedExecutor, Late(), memory_link(2, "out"), reports.append)
    assert waited == [0.001] * 3
    assert isinstance(reports[-1], Ended)


def test_a_long_step_shows_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage beats during a step, and when all work is over once more with nothing to tell."""
    monkeypatch.setattr("mlxcel.pipeline.pulse.BEAT_SECONDS", 0.001)
    inbox, outbox = memory_link(2, "in"), memory_link(2, "out")
    beats: list[Beat] = []
    during, afterwards = threading.Event(), threading.Event()

    class Holding(ScriptedExecutor):
        def memory(self) -> int:
            return 4096

    def report(given: Report) -> None:
        if isinstance(given, Beat):
            beats.append(given)
            during.set()
            if not given.busy:
                inbox.send(Stop())
                afterwards.set()

    def build(spec: StageSpec) -> ScriptedExecutor:
        return Holding(spec, on_step=lambda given: during.wait(60) or None)

    inbox.send(step(0, tensors=TENSORS))
    run_stage(FIRST, build, inbox, outbox, report)
    assert afterwards.is_set()
    assert beats[0].busy > 0 and beats[0].steps == 0
    assert sum(beat.steps for beat in beats) == 1
    assert (beats[-1].busy, beats[-1].memory) == (0.0, 4096)
    assert all(0 <= beat.busy <= beat.span for beat in beats)
