"""The loop of one stage: receive a step, run it, send the result on.

One piece of code behind every link. It knows neither MLX nor where it runs: both are the
executor's and the link's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from mlxcel.errors import ChannelClosed, DeadlineError, SamplingFailed
from mlxcel.pipeline.link import Inbox, Outbox
from mlxcel.pipeline.pulse import Pulse
from mlxcel.pipeline.report import Ended, Failed, Loaded, Loading, Report
from mlxcel.pipeline.step import Message, Step, StepFailed, Stop
from mlxcel.stage.contract import StageExecutor, StageSpec

IDLE_SECONDS = 60.0
"""How long one wait for work lasts before the loop looks again whether its link is open."""


def run_stage(
    spec: StageSpec,
    build: Callable[[StageSpec], StageExecutor],
    inbox: Inbox,
    outbox: Outbox,
    report: Callable[[Report], None],
    meet: Callable[[], None] = lambda: None,
) -> None:
    """Build, load and serve one stage, or one rank of it, until a :class:`Stop` or a closed link.

    Whatever goes wrong is reported, never raised: a failing step as :class:`StepFailed` to
    the next stage, anything else as :class:`Failed`. Where ranks are workers of their own a
    failing step is the end of all of them, as no other rank can go on, unless it was the drawing
    of tokens that failed.

    Args:
        meet: Called after loading; returns when the stage's other ranks have loaded too.
    """
    rank = spec.rank or 0
    try:
        with closing(build(spec)) as executor:
            outcome = _outcome(spec, executor, inbox, outbox, report, meet)
            if isinstance(outcome, Failed):  # told before others see anything close
                report(outcome)
        if isinstance(outcome, Ended):
            report(outcome)
    except BaseException as error:  # SystemExit of a plugin included: a thread has nobody above
        outcome = Failed(spec.index, error, rank)
        report(outcome)
    finally:
        # What is already in a closed link can still be read; both neighbours learn of the end.
        reason = f"{spec.title} has {'failed' if isinstance(outcome, Failed) else 'ended'}"
        inbox.close(reason)
        outbox.close(reason)


def _outcome(
    spec: StageSpec,
    executor: StageExecutor,
    inbox: Inbox,
    outbox: Outbox,
    report: Callable[[Report], None],
    meet: Callable[[], None],
) -> Ended | Failed:
    rank = spec.rank or 0
    try:
        began = time.perf_counter()
        size = executor.load(lambda done, total: report(Loading(spec.index, done, total, rank)))
        seconds = time.perf_counter() - began
        meet()
        report(Loaded(spec.index, size, seconds, rank))
        with closing(Pulse(spec.index, inbox, report, rank)) as pulse:
            return _serve(spec, executor, inbox, outbox, pulse)
    except ChannelClosed as closed:
        return Ended(spec.index, 0.0, None, None, str(closed), rank)
    except BaseException as error:
        return Failed(spec.index, error, rank)


def _serve(
    spec: StageSpec, executor: StageExecutor, inbox: Inbox, outbox: Outbox, pulse: Pulse
) -> Ended:
    busy, first, last = 0.0, None, None
    memory: Callable[[], int] = getattr(executor, "memory", lambda: 0)
    while True:
        try:
            message = inbox.receive(IDLE_SECONDS)
        except DeadlineError:
            continue
        if isinstance(message, Stop):
            outbox.send(message)
            return Ended(spec.index, busy, first, last, rank=spec.rank or 0)
        if not isinstance(message, Step):  # a failure of an earlier stage passes through
            outbox.send(message)
            continue
        if not message.tensors:
            outbox.send(_run(spec, executor, message))
            continue
        began = time.perf_counter()
        pulse.begin(began)
        answer = _run(spec, executor, message)
        ended = time.perf_counter()
        pulse.end(ended, memory())
        busy += ended - began
        first = began if first is None else first
        last = ended
        outbox.send(answer)


def _run(spec: StageSpec, executor: StageExecutor, step: Step) -> Message:
    try:
        return executor.run(step)
    except SamplingFailed as error:
        cause = error.cause
    except Exception as error:
        if spec.rank is not None:
            raise
        cause = f"{type(error).__name__}: {error}"
    return StepFailed(step.seq, step.slot, spec.index, executor.requests(step), cause)
