"""The scheduler: who gets a place, which step goes out, and that nothing is ever left over."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel.engine.kv_manager import AdmissionDiagnostic, StageKVManager
from mlxcel.engine.limits import Limits, credits_for
from mlxcel.engine.scheduler import Scheduler
from mlxcel.engine.sequence import Output, Sequence, State
from mlxcel.engine.slot import Request
from mlxcel.engine.stop_strings import StopStrings
from mlxcel.errors import GrammarFailed, LogitsError, MlxcelError
from mlxcel.family.caches import KVCacheKind
from mlxcel.pipeline.operations import Filter, Release
from mlxcel.pipeline.step import FAILED_GRAMMAR, FAILED_ROW, Step, StepFailed, Tokens
from mlxcel.testing.doubles import ScriptedExecutor, specs

KIND = KVCacheKind(1, 8, 8)
END = 999


def sequence(index: int, prompt: int = 3, tokens: int = 4) -> Sequence:
    request = Request(index, tuple(range(1, prompt + 1)), tokens)
    return Sequence(request, None, StopStrings(()))


def managers(stages: int, budget: int | None) -> list[StageKVManager]:
    return [
        StageKVManager(stage, [KIND] * 2, budget, itemsize=4, chunk=64) for stage in range(stages)
    ]


class Bench:
    """A scheduler on stages without a model; every stage's queue is what real links hold."""

    def __init__(
        self,
        stages: int = 3,
        limits: Limits | None = None,
        budget: int | None = None,
        script: Callable[[int, int], int] = lambda request, made: 1000 * request + made,
    ) -> None:
        self.limits = limits or Limits(chunk=4)
        self.refusals: list[AdmissionDiagnostic] = []
        self.managers = managers(stages, budget)
        self.scheduler = Scheduler(stages, self.managers, [END], self.limits, self.refusals.append)
        self.executors = [ScriptedExecutor(spec, script) for spec in specs(stages)]
        self.queues: list[list[Step | Tokens | StepFailed]] = [[] for _ in range(stages + 1)]
        self.outputs: list[Output] = []

    def send(self) -> list[Step]:
        """Send what may be sent now; nothing ever exceeds the credits."""
        sent = []
        for step in self.scheduler.steps():
            self.queues[0].append(step)
            sent.append(step)
        assert self.scheduler.in_flight <= credits_for(len(self.executors), self.limits)
        assert self.scheduler.in_flight == sum(map(len, self.queues))
        return sent

    def work(self, stage: int) -> None:
        """Let one stage run the first step of its queue."""
        message = self.queues[stage].pop(0)
        assert isinstance(message, Step)
        self.queues[stage + 1].append(self.executors[stage].run(message))

    def answer(self) -> list[Output]:
        answer = self.queues[-1].pop(0)
        assert isinstance(answer, Tokens | StepFailed)
        outputs = self.scheduler.take(answer)
        self.outputs += outputs
        return outputs

    def run(self, pick: Callable[[int], int] = lambda n: n - 1, rounds: int = 100_000) -> None:
        """Until everything is done, ``pick`` choosing which of the ready stages works next."""
        for _ in range(rounds):
            self.send()
            ready = [at for at, queue in enumerate(self.queues) if queue]
            if not ready:
                assert self.scheduler.idle
                return
            at = ready[pick(len(ready))]
            if at == len(self.executors):
                self.answer()
            else:
                self.work(at)
        raise AssertionError("the scheduler does not come to rest")

    def tokens(self) -> dict[int, list[int]]:
        made: dict[int, list[int]] = {}
        for output in self.outputs:
            made.setdefault(output.request, []).extend(output.tokens)
        return made

    def clean(self) -> None:
        """Nothing is left: no row on any stage, no byte reserved."""
        assert all(executor.rows == {} for executor in self.executors)
        assert all(manager.used == 0 for manager in self.managers)
        assert self.scheduler.active == 0


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=12),
    st.sampled_from([None, 1, 2, 3]),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_every_request_gets_exactly_its_tokens(
    stages: int,
    shapes: list[tuple[int, int]],
    micro_batch: int | None,
    chunk: int,
    rng: random.Random,
) -> None:
    """Whatever is batched with whatever, and however the stages interleave, nothing is mixed up."""
    limits = Limits(parallel=5, batch=4, micro_batch=micro_batch, chunk=chunk)
    bench = Bench(stages, limits, budget=200_000)
    for index, (prompt, tokens) in enumerate(shapes):
        bench.scheduler.add(sequence(index, prompt, tokens))
    bench.run(lambda n: rng.randrange(n))
    assert bench.tokens() == {
        index: [1000 * index + made for made in range(tokens)]
        for index, (_, tokens) in enumerate(shapes)
    }
    endings = Counter(o.request for o in bench.outputs if o.finish_reason == "length")
    assert endings == dict.fromkeys(range(len(shapes)), 1)
    bench.clean()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_cancels_at_any_moment_leave_nothing(stages: int, rng: random.Random) -> None:
    """Cancelled while waiting, in prefill, decoding or in flight: rows and bytes are given back."""
    bench = Bench(stages, Limits(parallel=6, batch=3, chunk=4))
    finished: set[int] = set()
    for index in range(20):
        bench.scheduler.add(sequence(index, rng.randint(1, 12), rng.randint(1, 6)))
        for _ in range(rng.randint(0, 6)):
            bench.send()
            ready = [at for at, queue in enumerate(bench.queues) if queue]
            if ready and (at := rng.choice(ready)) < stages:
                bench.work(at)
            elif ready:
                bench.answer()
        victim = rng.randint(0, index)
        done = {o.request for o in bench.outputs if o.finish_reason}
        output = bench.scheduler.cancel(victim)
        assert (output is None) == (victim in done)
        if output is not None:
            assert output.finish_reason == "cancelled"
            bench.outputs.append(output)
    bench.run(lambda n: rng.randrange(n))
    finished = {o.request for o in bench.outputs if o.finish_reason}
    assert finished == set(range(20))
    assert all(
        n == 1 for n in Counter(o.request for o in bench.outputs if o.finish_reason).values()
    )
    bench.clean()


def test_each_stage_has_a_slot() -> None:
    """As many sequences as stages decode as as many batches, so that every stage has work."""
    bench = Bench(3)
    for index in range(3):
        bench.scheduler.add(sequence(index, 1, 8))
    handles = {step.slot for step in bench.send()}
    assert len(handles) == 3


def test_a_slot_has_one_decode_step_in_flight() -> None:
    """Until a slot's answer is there, it sends nothing more."""
    bench = Bench(1)
    bench.scheduler.add(sequence(0, 1, 8))
    assert len(bench.send()) == 1
    assert bench.send() == []
    bench.work(0)
    assert bench.send() == []
    bench.answer()
    assert len(bench.send()) == 1


def test_chunks_of_a_long_prompt_follow_each_other() -> None:
    """A prompt's chunks do not wait for answers, up to two a stage."""
    bench = Bench(2, Limits(chunk=4))
    bench.scheduler.add(sequence(0, 41, 1))
    steps = bench.send()
    assert [step.tensors["tokens"].shape for step in steps] == [(1, 4)] * 4
    assert not any(step.sample for step in steps)


def test_decoding_goes_before_prompts() -> None:
    """While something decodes, a long prompt holds one chunk a stage, and the slot goes first."""
    bench = Bench(2, Limits(chunk=4))
    bench.scheduler.add(sequence(0, 1, 50))
    bench.send()
    bench.work(0)
    bench.work(1)
    bench.answer()
    bench.scheduler.add(sequence(1, 400, 1))
    first, *chunks = bench.send()
    assert first.sample
    assert len(chunks) == 2


def test_short_prompts_share_a_step() -> None:
    """Prompts that fit into one chunk together go through the stages as one padded batch."""
    bench = Bench(1, Limits(chunk=16))
    for index in range(4):
        bench.scheduler.add(sequence(index, 4, 1))
    assert bench.send()[0].tensors["tokens"].shape == (4, 3)


def test_rows_leave_with_the_next_step() -> None:
    """Who is finished is filtered out by the operations of the batch's next step."""
    bench = Bench(1, Limits(chunk=16))
    bench.scheduler.add(sequence(0, 2, 1))
    bench.scheduler.add(sequence(1, 2, 3))
    for _ in range(2):
        bench.send()
    while bench.queues[0]:
        bench.work(0)
    while bench.queues[1]:
        bench.answer()
    [step] = bench.send()
    assert [op for op in step.operations if isinstance(op, Filter)] == [Filter(step.slot, (1,))]


def test_memory_makes_sequences_wait_in_their_order() -> None:
    """Who does not fit waits, nobody overtakes, and the refusal is reported once."""
    stage = managers(1, None)[0]
    bench = Bench(1, Limits(chunk=64), budget=stage.bytes_of(2, 40))
    for index in range(4):
        bench.scheduler.add(sequence(index, 36, 4))
    bench.send()
    assert [s.request.index for s in bench.scheduler.waiting] == [2, 3]
    bench.send()
    assert len(bench.refusals) == 1
    bench.run()
    assert sorted(bench.tokens()) == [0, 1, 2, 3]
    bench.clean()


def test_what_can_never_fit_is_known_at_once() -> None:
    """A sequence larger than an empty stage's budget is told apart from one that has to wait."""
    bench = Bench(2, budget=managers(1, None)[0].bytes_of(1, 40))
    assert bench.scheduler.impossible(sequence(0, 36, 4)) is None
    diagnostic = bench.scheduler.impossible(sequence(0, 36, 5))
    assert diagnostic is not None
    assert diagnostic.required_bytes > diagnostic.budget_bytes


def test_end_tokens_end_a_text_and_are_no_text() -> None:
    """The model's end token finishes with stop and is not delivered."""
    bench = Bench(1, script=lambda request, made: [7, 8, END][made])
    bench.scheduler.add(sequence(0, 1, 50))
    bench.run()
    assert bench.tokens() == {0: [7, 8]}
    assert bench.outputs[-1].finish_reason == "stop"


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("micro_batch", [None, 2, 16])
def test_all_that_may_run_do(stages: int, micro_batch: int | None) -> None:
    """However few rows a step may have, as many sequences run at once as the operator allows."""
    bench = Bench(stages, Limits(parallel=10, batch=4, micro_batch=micro_batch, chunk=4))
    for index in range(12):
        bench.scheduler.add(sequence(index, 3, 4))
    bench.send()
    assert (bench.scheduler.active, len(bench.scheduler.waiting)) == (10, 2)
    bench.run()
    assert {len(tokens) for tokens in bench.tokens().values()} == {4}
    bench.clean()


@pytest.mark.parametrize(
    ("failure", "kind"), [(FAILED_ROW, LogitsError), (FAILED_GRAMMAR, GrammarFailed)]
)
def test_a_row_that_fails_fails_alone(failure: int, kind: type[MlxcelError]) -> None:
    """A row without a token ends with an error; the others of its batch go on."""
    bench = Bench(
        2, Limits(chunk=16), script=lambda request, made: failure if request == 1 else made
    )
    for index in range(3):
        bench.scheduler.add(sequence(index, 2, 3))
    bench.run()
    assert bench.tokens() == {0: [0, 1, 2], 1: [], 2: [0, 1, 2]}
    [error] = [output.error for output in bench.outputs if output.error]
    assert isinstance(error, kind)
    bench.clean()


@pytest.mark.parametrize("prompt", [1, 30])
def test_a_step_that_fails_takes_its_batch_only(prompt: int) -> None:
    """A stage that cannot run a step: its requests end with an error, the others go on."""
    bench = Bench(1, Limits(micro_batch=1, parallel=2, chunk=4))
    bench.scheduler.add(sequence(0, prompt, 3))
    bench.scheduler.add(sequence(1, 1, 3))
    victim = bench.send()[0]
    at = bench.queues[0].index(victim)
    bench.queues[0].pop(at)
    bench.queues[1].append(StepFailed(victim.seq, victim.slot, 0, (0,), "RuntimeError: no"))
    bench.executors[0].rows.setdefault(victim.slot, [0])
    bench.run()
    errors = {output.request: output.error for output in bench.outputs if output.error}
    assert list(errors) in ([0], [1])
    good = 1 - next(iter(errors))
    assert bench.tokens()[good] == [1000 * good + made for made in range(3)]
    bench.clean()


def test_releases_are_sent_even_when_nothing_else_is() -> None:
    """The last batch is given back by a step of its own."""
    bench = Bench(1)
    bench.scheduler.add(sequence(0, 1, 1))
    bench.send()
    bench.work(0)
    bench.answer()
    [step] = bench.send()
    assert [type(op) for op in step.operations] == [Release]
    assert step.tensors == {}


def test_states() -> None:
    """A sequence waits, gets its prompt run, decodes and completes."""
    bench = Bench(1, Limits(chunk=4))
    one = sequence(0, 9, 2)
    seen = [one.state]
    bench.scheduler.add(one)
    for _ in range(12):
        bench.send()
        seen.append(one.state)
        if bench.queues[0]:
            bench.work(0)
        if bench.queues[1]:
            bench.answer()
        seen.append(one.state)
    assert list(dict.fromkeys(seen)) == [
        State.WAITING,
        State.PENDING_PREFILL,
        State.DECODING,
        State.COMPLETED,
    ]


def test_many_requests_schedule_in_linear_work() -> None:
    """The steps for n queued requests grow with n, not with its square: counted, not timed."""

    def calls(n: int) -> int:
        bench = Bench(1, Limits(parallel=8, batch=8, chunk=8))
        for index in range(n):
            bench.scheduler.add(sequence(index, 1, 1))
        counted = 0
        while not bench.scheduler.idle:
            counted += len(bench.send())
            while bench.queues[0]:
                bench.work(0)
            while bench.queues[1]:
                bench.answer()
        return counted

    assert calls(400) <= 2.5 * calls(200)
