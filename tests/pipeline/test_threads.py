"""A pipeline of threads, without a model in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxcel.errors import ChannelFull, CheckpointError, DeadlineError, StageError, Unavailable
from mlxcel.pipeline.link import Link
from mlxcel.pipeline.operations import New, Sampling
from mlxcel.pipeline.step import Step, StepFailed, Tokens
from mlxcel.pipeline.threads import ThreadPipeline
from mlxcel.stage.contract import StageSpec
from mlxcel.testing.doubles import ScriptedExecutor, specs

STAGES = 3


def pipeline(
    stage: int | None = None, *, timeout: float = 60.0, credits: int = 4, **options: Any
) -> ThreadPipeline:
    """A pipeline of three scripted stages; ``options`` are those of stage ``stage``."""

    def build(spec: StageSpec) -> ScriptedExecutor:
        return ScriptedExecutor(spec, **(options if spec.index == stage else {}))

    return ThreadPipeline(specs(STAGES), build, credits=credits, timeout=timeout)


def step(seq: int) -> Step:
    """A step that brings its own request and asks for its first token."""
    return Step(seq, seq, (New(seq, seq, Sampling()),), {"tokens": object()}, sample=True)


def raiser(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Whatever a test does, no thread of a stage outlives it."""
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    assert [thread for thread in left if thread.name.startswith("mlxcel-stage")] == []


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event for stages to wait on; set when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_answers_come_in_the_order_of_the_steps() -> None:
    """Steps in flight together are answered one by one, first in first out."""
    running = pipeline()
    running.start()
    for seq in range(4):
        running.submit(step(seq))
    assert [running.receive() for _ in range(4)] == [Tokens(i, i, (1000 * i,)) for i in range(4)]
    running.stop()


def test_loading_is_reported() -> None:
    """Every stage reports its progress, and afterwards its bytes."""
    seen: list[tuple[int, int, int]] = []
    running = pipeline()
    running.start(lambda *report: seen.append(report))
    assert sorted(seen) == [(stage, 1, 1) for stage in range(STAGES)]
    assert [(loaded.stage, loaded.bytes) for loaded in running.loaded] == [(0, 1), (1, 1), (2, 1)]
    running.stop()


def test_each_stage_has_a_thread_of_its_own() -> None:
    """Executors are built, loaded and run in one thread each, and not in the caller's."""
    seen: dict[int, set[int]] = {stage: set() for stage in range(STAGES)}

    def build(spec: StageSpec) -> ScriptedExecutor:
        def note(*_: object) -> None:
            seen[spec.index].add(threading.get_ident())

        note()
        return ScriptedExecutor(spec, on_load=note, on_step=note)

    running = ThreadPipeline(specs(STAGES), build, credits=4, timeout=60)
    running.start()
    running.submit(step(0))
    running.receive()
    running.stop()
    assert all(len(threads) == 1 for threads in seen.values())
    assert len(set.union(*seen.values()) - {threading.get_ident()}) == STAGES


def test_status_shares_one_span() -> None:
    """The busy seconds of each stage lie within the span that all stages share."""
    running = pipeline()
    running.start()
    for seq in range(4):
        running.submit(step(seq))
    for _ in range(4):
        running.receive()
    statuses = running.stop()
    assert [status.stage for status in statuses] == [0, 1, 2]
    assert len({status.span_seconds for status in statuses}) == 1
    for status in statuses:
        assert 0 < status.busy_seconds <= status.span_seconds
        assert status.busy_fraction + status.bubble_fraction == 1


def test_a_pipeline_that_never_worked_has_no_span() -> None:
    """Without a single step, busy and span are zero and the shares are defined."""
    running = pipeline()
    running.start()
    for status in running.stop():
        assert (status.busy_seconds, status.span_seconds, status.busy_fraction) == (0, 0, 0)


def test_more_steps_than_credits_is_a_bug_that_shows(gate: threading.Event) -> None:
    """Links hold no more than the credits (and the final Stop): nothing queues without bound."""
    taken = threading.Event()

    def wait(given: Step) -> None:
        taken.set()
        gate.wait()

    running = pipeline(0, credits=2, on_step=wait)
    running.start()
    running.submit(step(0))
    taken.wait()
    for seq in range(1, 4):
        running.submit(step(seq))
    with pytest.raises(ChannelFull):
        running.submit(step(4))
    gate.set()
    running.stop(drain=False)


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_failed_step_comes_back_as_one_answer(stage: int) -> None:
    """Whichever stage fails, the answer names it and its requests, and the next step works."""

    def fail(given: Step) -> None:
        if given.seq == 1:
            raise ValueError("broken on purpose")

    running = pipeline(stage, on_step=fail)
    running.start()
    for seq in range(3):
        running.submit(step(seq))
    answers = [running.receive() for _ in range(3)]
    assert answers[0::2] == [Tokens(0, 0, (0,)), Tokens(2, 2, (2000,))]
    assert answers[1] == StepFailed(1, 1, stage, (), "ValueError: broken on purpose")
    running.stop()


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_stage_that_cannot_load_raises_its_own_error(stage: int) -> None:
    """start() raises the very error of the stage, and stop() ends all the others."""
    error = CheckpointError(Path("model.safetensors"), "is broken.", "Get it again.")
    running = pipeline(stage, on_load=raiser(error))
    with pytest.raises(CheckpointError) as caught:
        running.start()
    assert caught.value is error
    running.stop()


@pytest.mark.parametrize("stage", range(STAGES))
def test_an_error_of_another_kind_becomes_typed(stage: int) -> None:
    """What is not mlxcel's own becomes a StageError that names the stage and keeps the cause."""
    running = pipeline(stage, on_load=raiser(RuntimeError("no such device")))
    with pytest.raises(
        StageError, match=f"stage {stage} .* RuntimeError: no such device"
    ) as caught:
        running.start()
    assert isinstance(caught.value.__cause__, RuntimeError)
    running.stop()


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_plugin_that_exits_ends_the_pipeline_only(stage: int) -> None:
    """SystemExit in an executor's step ends all stages and is named where answers are read."""
    running = pipeline(stage, on_step=raiser(SystemExit("from a plugin")))
    running.start()
    running.submit(step(0))
    with pytest.raises(StageError, match=f"stage {stage} .* SystemExit: from a plugin"):
        running.receive()
    running.stop()


def test_a_dead_first_stage_is_named_at_submit() -> None:
    """A step for a stage that is gone raises what ended the stage."""
    dead = threading.Event()

    class Dying(ScriptedExecutor):
        def close(self) -> None:
            dead.set()

    def fail(given: Step) -> None:
        raise SystemExit("gone")

    def build(spec: StageSpec) -> ScriptedExecutor:
        return Dying(spec, on_step=fail) if spec.index == 0 else ScriptedExecutor(spec)

    running = ThreadPipeline(specs(2), build, credits=9, timeout=60)
    running.start()
    running.submit(step(0))
    dead.wait(60)
    running._threads[0].join(60)
    with pytest.raises(StageError, match=r"stage 0 .* SystemExit: gone"):
        running.submit(step(1))
    running.stop()


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_stage_that_never_answers(stage: int, gate: threading.Event) -> None:
    """Waiting ends with an error that names who was waited for and the flag to change."""
    running = pipeline(stage, timeout=0.05, on_step=lambda given: gate.wait())
    running.start()
    running.submit(step(0))
    with pytest.raises(DeadlineError, match=r"stage 2 .* 0\.05 s .* --pp-timeout") as caught:
        running.receive()
    assert caught.value.seconds == 0.05
    with pytest.raises(DeadlineError, match=f"mlxcel-stage-{stage} .* --pp-timeout"):
        running.stop()
    gate.set()
    running.timeout = 60.0
    running.stop()


def test_a_stage_that_never_loads(gate: threading.Event) -> None:
    """Loading without progress ends with an error that names who is late and the flag to change."""
    running = pipeline(1, timeout=0.05, on_load=gate.wait)
    with pytest.raises(DeadlineError, match=r"^stage 1 did .* load\..*--pp-timeout"):
        running.start()
    gate.set()
    running.timeout = 60.0
    running.stop()


def test_loading_without_news_can_be_given_up(gate: threading.Event) -> None:
    """While nothing comes, whoever waits is asked again and again, and may end it."""

    told: list[tuple[int, ...]] = []

    def give_up(*progress: int) -> None:
        if progress in told:
            raise Unavailable("enough")
        told.append(progress)

    running = pipeline(1, on_load=gate.wait)
    with pytest.raises(Unavailable, match="enough"):
        running.start(give_up)
    gate.set()
    running.stop()


def test_stop_can_be_repeated() -> None:
    """A second stop changes nothing and gives the same report."""
    running = pipeline()
    running.start()
    running.submit(step(0))
    running.receive()
    assert running.stop() == running.stop()


def test_stop_without_start() -> None:
    """A pipeline that was never started has nothing to end."""
    assert pipeline().stop() == ()


def test_links_can_be_wrapped() -> None:
    """``wrap`` stands around every link, the engine's two included."""
    wrapped: list[Link] = []

    def wrap(link: Link) -> Link:
        wrapped.append(link)
        return link

    running = ThreadPipeline(specs(STAGES), ScriptedExecutor, credits=1, timeout=60, wrap=wrap)
    assert len(wrapped) == STAGES + 1
    running.start()
    running.stop()
