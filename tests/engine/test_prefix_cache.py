"""Remembered prompts: found by their beginning, forgotten in order, and never wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.engine.engine import Engine, Settings
from mlxcel.engine.generation import Generation
from mlxcel.engine.kv_manager import StageKVManager
from mlxcel.engine.limits import Limits, credits_for
from mlxcel.engine.local import open_model, running
from mlxcel.engine.prefix_cache import LEAST_TOKENS, Entry, PrefixCache, common_prefix
from mlxcel.engine.scheduler import Scheduler
from mlxcel.engine.sequence import Output, Sequence
from mlxcel.engine.slot import Request, Start
from mlxcel.engine.stop_strings import StopStrings
from mlxcel.family.caches import (
    CacheGroup,
    CacheKind,
    KVCacheKind,
    RotatingCacheKind,
    StateCacheKind,
)
from mlxcel.pipeline.step import Step, StepFailed, Tokens
from mlxcel.plugins import Plugins
from mlxcel.testing.doubles import ScriptedExecutor, specs
from mlxcel.testing.quick import quick

FULL = KVCacheKind(1, 8, 8)
A = tuple(range(100, 140))


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    """The length of what two sequences share at their beginning."""
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(tuple(a), tuple(b)) == expected


def test_the_longest_beginning_wins() -> None:
    """Of several entries the one that covers most of the prompt is used, exactly or trimmed."""
    cache = PrefixCache([FULL])
    cache.add(Entry(1, A[:20]))
    cache.add(Entry(2, (*A[:30], 7, 7)))
    assert cache.find((*A[:20], 5)) == Start(1, 0, 20)
    assert cache.find((*A, 5)) == Start(2, 2, 30)
    assert cache.find((9, *A)) is None


def test_the_last_token_always_runs() -> None:
    """A prompt that is known whole still runs its last token, which makes the first draw."""
    cache = PrefixCache([FULL])
    cache.add(Entry(1, A[:20]))
    assert cache.find(A[:20]) == Start(1, 1, 19)
    assert cache.find(A[:21]) == Start(1, 0, 20)


def test_short_beginnings_are_not_used() -> None:
    """Less than LEAST_TOKENS in common is not worth a copy, and not worth an entry."""
    cache = PrefixCache([FULL])
    cache.add(Entry(1, A))
    assert cache.find((*A[: LEAST_TOKENS - 1], 1, 1)) is None
    assert not cache.wants(A[:LEAST_TOKENS])
    assert cache.wants((*A[:LEAST_TOKENS], 1))
    assert not cache.wants((*A, 1)), "it is there already"


@pytest.mark.parametrize(
    ("kinds", "trims"),
    [
        ([FULL, None], True),
        ([FULL, RotatingCacheKind(1, 8, 8, 41)], True),
        ([FULL, RotatingCacheKind(1, 8, 8, 40)], False),
        ([FULL, StateCacheKind(((4, None),))], False),
        ([CacheGroup((FULL, StateCacheKind(((4, None),))))], False),
    ],
)
def test_only_what_can_forget_is_trimmed(kinds: list[CacheKind | None], trims: bool) -> None:
    """Recurrent states and full windows are used only where the prompt goes on after them."""
    cache = PrefixCache(kinds)
    cache.add(Entry(1, A))
    assert (cache.find((*A[:30], 1, 1)) is not None) is trims
    assert cache.find((*A, 1, 1)) == Start(1, 0, 40)


def test_the_least_recently_used_goes_first() -> None:
    """Finding an entry keeps it; the one that was used longest ago is evicted."""
    cache = PrefixCache([FULL])
    for handle in range(3):
        cache.add(Entry(handle, tuple(100 * handle + i for i in range(20))))
    cache.find((*range(20), 1))
    evicted = [entry.handle for entry in iter(cache.evict, None)]
    assert evicted == [1, 2, 0]
    assert len(cache) == 0


def test_capacity_zero_switches_it_off() -> None:
    """Without capacity nothing is remembered."""
    assert not PrefixCache([FULL], capacity=0).wants(A)


def test_remembered_prompts_make_room_for_sequences() -> None:
    """Entries count against the budget, and go before a sequence has to wait."""
    manager = StageKVManager(0, [FULL], None, itemsize=4, chunk=64)
    manager.budget = manager.bytes_of(1, 50) + manager.bytes_of(1, 39)
    scheduler = Scheduler(
        1, [manager], (), Limits(chunk=64), prefixes=PrefixCache([FULL], capacity=4)
    )
    executor = ScriptedExecutor(specs(1)[0])

    def run(index: int, prompt: tuple[int, ...]) -> None:
        scheduler.add(Sequence(Request(index, prompt, 50 - len(prompt)), None, StopStrings(())))
        while not scheduler.idle:
            for step in scheduler.steps():
                answer = executor.run(step)
                assert isinstance(answer, Tokens)
                scheduler.take(answer)

    run(0, A)
    assert manager.used == manager.bytes_of(1, 39)
    run(1, tuple(token + 1000 for token in A))
    assert manager.used == manager.bytes_of(1, 39), "the first entry made room for the second"
    assert len(executor.rows) == 1


FAMILIES = ("llama", "llama_sliding", "gemma4", "qwen3_5", "jamba", "deepseek_v3", "llama4")


@pytest.mark.parametrize("name", quick(FAMILIES, ("llama", "llama_sliding", "jamba")))
def test_a_known_beginning_changes_nothing(tiny: Callable[..., Path], name: str) -> None:
    """Conversations that grow turn by turn get the tokens of runs that know nothing."""
    rng = random.Random(name)
    model = open_model(tiny(name), Plugins.discover(), size=2)
    settings = Settings(Limits(chunk=16))
    ends: dict[int, Output] = {}
    made: dict[int, list[int]] = {}

    def deliver(outputs: list[Output]) -> None:
        for output in outputs:
            made.setdefault(output.request, []).extend(output.tokens)
            if output.finish_reason:
                ends[output.request] = output
                done.release()

    done = threading.Semaphore(0)
    asked: list[Request] = []
    with running(model, credits=credits_for(2, settings.limits), timeout=60) as pipeline:
        engine = Engine(pipeline, [], model.tokenizer, settings, deliver, kinds=model.cache_kinds)
        engine.start()
        system = tuple(rng.randrange(250) for _ in range(24))
        talks = [system, system, tuple(rng.randrange(250) for _ in range(24))]
        for _ in range(4):
            batch = []
            for talk, known in enumerate(talks):
                prompt = (*known, *(rng.randrange(250) for _ in range(rng.randint(1, 20))))
                batch.append(Request(len(asked) + len(batch), prompt, 5, ignore_end=True))
                talks[talk] = prompt
            for request in batch:
                engine.submit(request)
            for _ in batch:
                assert done.acquire(timeout=60)
            asked += batch
            talks = [(*p, *made[r.index]) for p, r in zip(talks, batch, strict=True)]
        engine.stop(drain=60)
        single = {
            request.index: [
                token.token
                for token in Generation(pipeline, [request], end_tokens=(), rows=1, chunk=512)
            ]
            for request in asked
        }
    assert made == single
    cached = [ends[request.index].cached for request in asked]
    assert all(cached[3:]), "from the second turn on, every prompt begins with a known one"
    assert all(c < len(r.prompt) for c, r in zip(cached, asked, strict=True))


class Busy:
    """A scheduler with remembered prompts on one stage, driven by hand."""

    def __init__(self) -> None:
        self.cache = PrefixCache([FULL], capacity=8)
        self.scheduler = Scheduler(1, [], (), Limits(chunk=8), prefixes=self.cache)
        self.executor = ScriptedExecutor(specs(1)[0])
        self.outputs: list[Output] = []

    def add(self, index: int, prompt: tuple[int, ...]) -> None:
        request = Request(index, prompt, 2)
        self.scheduler.add(Sequence(request, None, StopStrings(())))

    def run(self, fail: Callable[[Step], bool] = lambda step: False) -> None:
        while not self.scheduler.idle:
            for step in list(self.scheduler.steps()):
                answer: Tokens | StepFailed
                if fail(step):
                    answer = StepFailed(step.seq, step.slot, 0, (), "no")
                else:
                    done = self.executor.run(step)
                    assert isinstance(done, Tokens)
                    answer = done
                self.outputs += self.scheduler.take(answer)


def test_a_prompt_that_is_cancelled_is_not_remembered() -> None:
    """What never ran whole is no beginning for others."""
    busy = Busy()
    busy.add(0, A)
    next(busy.scheduler.steps())
    busy.scheduler.cancel(0)
    assert len(busy.cache) == 0
    busy.add(1, (*A, 1))
    assert busy.cache.find((*A, 1)) is None


def test_a_step_that_fails_remembers_nothing() -> None:
    """If the step that keeps a prompt fails on a stage, nobody starts from that prompt."""
    busy = Busy()
    busy.add(0, A)
    busy.run(lambda step: step.sample)
    assert [output.finish_reason for output in busy.outputs] == ["error"]
    assert len(busy.cache) == 0
    busy.add(1, A)
    busy.run()
    assert busy.outputs[-1].finish_reason == "length"
    assert busy.outputs[-1].cached == 0


def test_what_will_be_copied_is_not_evicted() -> None:
    """An entry stays until the step that copies it has been sent, then it can go."""
    busy = Busy()
    busy.add(0, A)
    busy.run()
    assert busy.cache.find((*A, 1)) is not None
    [handle] = busy.executor.rows
    busy.cache.pin(handle)
    assert busy.cache.evict() is None
    busy.cache.unpin(handle)
    assert busy.cache.evict() == Entry(handle, A[:-1])


def test_a_cancelled_copy_lets_go() -> None:
    """A request that would have started from an entry and is cancelled first does not pin it."""
    busy = Busy()
    busy.add(0, A)
    busy.run()
    busy.add(1, (*A, 1, 2))
    busy.scheduler._jobs += busy.scheduler._admission.admit()
    assert busy.cache.evict() is None
    busy.scheduler.cancel(1)
    busy.run()
    assert busy.cache.evict() is not None
