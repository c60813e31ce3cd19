"""The loop of one stage: receive a step, run it, send the result on.

One piece of code behind every link. It knows neither MLX nor where it runs: both are the
executor's and the link's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from mlxcel.errors import ChannelClosed, DeadlineError
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
) -> None:
    """Build, load and serve one stage until a :class:`Stop` or a closed link.

    Whatever goes wrong is reported, never raised: a failing step as :class:`StepFailed` to
    the next stage, anything else as :class:`Failed`.
    """
    reason = f"stage {spec.index} has ended"
    try:
        with closing(build(spec)) as executor:
            began = time.perf_counter()
            size = executor.load(lambda done, total: report(Loading(spec.index, done, total)))
            report(Loaded(spec.index, size, time.perf_counter() - began))
            with closing(Pulse(spec.index, inbox, report)) as pulse:
                ended = _serve(spec, executor, inbox, outbox, pulse)
        report(ended)
    except ChannelClosed as closed:
        report(Ended(spec.index, 0.0, None, None, str(closed)))
    except BaseException as error:  # SystemExit of a plugin included: a thread has nobody above
        report(Failed(spec.index, error))
        reason = f"stage {spec.index} has failed"
    finally:
        # What is already in a closed link can still be read; both neighbours learn of the end.
        inbox.close(reason)
        outbox.close(reason)


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
            return Ended(spec.index, busy, first, last)
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
    except Exception as error:
        return StepFailed(
            step.seq,
            step.slot,
            spec.index,
            executor.requests(step),
            f"{type(error).__name__}: {error}",
        )
