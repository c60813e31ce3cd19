"""The engine's loop over slots, without a model: scripts answer instead."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.engine.generation import Generation, Token
from mlxcel.engine.slot import Request
from mlxcel.errors import LogitsError, StageError
from mlxcel.pipeline.operations import Filter, Finalize, Operation, Prepare, Release
from mlxcel.pipeline.step import FAILED_ROW, Step, Tokens
from mlxcel.testing.doubles import DirectPipeline, ScriptedExecutor, scripted_pipeline, specs

END = 99
LONG = list(range(1000, 1100))


def request(index: int, length: int = 3, max_tokens: int = 4) -> Request:
    return Request(index, tuple(range(length)), max_tokens)


def generation(
    pipeline: DirectPipeline, requests: Sequence[Request], rows: int = 1, chunk: int = 512
) -> Generation:
    return Generation(pipeline, requests, end_tokens=[END], rows=rows, chunk=chunk)


def operations(pipeline: DirectPipeline, *kinds: type[Operation]) -> list[Operation]:
    return [o for step in pipeline.submitted for o in step.operations if isinstance(o, kinds)]


def test_length_and_stop() -> None:
    """A text ends by its own end token, which is no part of it, or by max_tokens."""
    pipeline = scripted_pipeline({0: [5, 6, END], 1: LONG})
    events = list(generation(pipeline, [request(0), request(1, max_tokens=2)]))
    assert [event for event in events if event.index == 0] == [
        Token(0, 5), Token(0, 6), Token(0, None, "stop"),
    ]  # fmt: skip
    assert [event for event in events if event.index == 1] == [
        Token(1, 1000), Token(1, 1001, "length"),
    ]  # fmt: skip


def test_an_end_token_in_the_last_place_is_a_stop() -> None:
    """max_tokens counts tokens of text: an end token after all of them never comes."""
    script = {0: [5, END], 1: [5, 6, END], 2: [END]}
    events = generation(scripted_pipeline(script), [request(i, max_tokens=2) for i in script])
    last = {event.index: event for event in events}
    assert last == {0: Token(0, None, "stop"), 1: Token(1, 6, "length"), 2: Token(2, None, "stop")}


def test_rows_leave_when_they_finish() -> None:
    """Finished rows are filtered out with the slot's next step; the last one releases it."""
    pipeline = scripted_pipeline({0: [1, END], 1: LONG, 2: [1, 2, END]})
    requests = [request(0), request(1), request(2)]
    made = [event.index for event in generation(pipeline, requests, rows=3)]
    assert made == [0, 1, 2, 0, 1, 2, 1, 2, 1]
    assert operations(pipeline, Filter, Release) == [
        Filter(0, (1, 2)), Filter(0, (0,)), Release(0),
    ]  # fmt: skip
    assert pipeline.submitted[-1].tensors == {}


def test_steps_are_numbered_in_order() -> None:
    """Sequence numbers rise by one, over all slots."""
    pipeline = scripted_pipeline(dict.fromkeys(range(5), LONG), credits=2)
    list(generation(pipeline, [request(i) for i in range(5)], rows=2))
    assert [step.seq for step in pipeline.submitted] == list(range(len(pipeline.submitted)))


@pytest.mark.parametrize("credits", [1, 2, 3, 8])
def test_credits_are_used_and_never_exceeded(credits: int) -> None:
    """As many steps are in flight as there is work for, up to the credits."""
    pipeline = scripted_pipeline(dict.fromkeys(range(4), LONG), credits=credits)
    list(generation(pipeline, [request(i, length=20) for i in range(4)], chunk=4))
    assert max(pipeline.in_flight) == credits


def test_chunks_follow_each_other_without_waiting() -> None:
    """All chunks of a prompt are on their way before the first answer is read."""
    pipeline = scripted_pipeline({0: LONG}, credits=8)
    list(generation(pipeline, [request(0, length=17)], chunk=4))
    assert pipeline.in_flight[:5] == [1, 2, 3, 4, 5]


def test_a_slot_decodes_one_step_at_a_time() -> None:
    """However many credits there are, a slot's next token waits for the one before."""
    pipeline = scripted_pipeline({0: LONG, 1: LONG}, credits=8)
    list(generation(pipeline, [request(0, length=1), request(1, length=1)]))
    assert max(pipeline.in_flight) == 2


def test_slots_take_turns() -> None:
    """With one credit, every slot gets a step before any gets its second."""
    pipeline = scripted_pipeline(dict.fromkeys(range(3), LONG), credits=1)
    run = generation(pipeline, [request(i, length=9) for i in range(3)], chunk=4)
    list(run)
    handles = [slot.handle for slot in run.slots]
    order = [step.slot for step in pipeline.submitted]
    assert order == handles * (len(order) // 3)


def test_a_failed_step_ends_the_generation() -> None:
    """StepFailed becomes a StageError with the stage and the cause as it saw it."""

    def fail(step: Step) -> None:
        if step.seq == 2:
            raise ValueError("broken on purpose")

    first, last = specs(2)
    pipeline = DirectPipeline([ScriptedExecutor(first), ScriptedExecutor(last, on_step=fail)])
    with pytest.raises(StageError, match="stage 1 failed during a step: ValueError: broken") as it:
        list(generation(pipeline, [request(0, max_tokens=9)]))
    assert it.value.stage == 1


def test_logits_that_are_not_numbers() -> None:
    """What is no token ends the generation with an error that says so."""
    pipeline = scripted_pipeline({0: [5, FAILED_ROW, 6]})
    with pytest.raises(LogitsError, match="not numbers"):
        list(generation(pipeline, [request(0)]))


def test_progress() -> None:
    """Per request: tokens made, and the times of its first step, first and last token in order."""
    run = generation(scripted_pipeline({0: [5, END], 1: LONG}), [request(0), request(1)])
    assert {p.made for p in run.progress.values()} == {0}
    list(run)
    assert {index: p.made for index, p in run.progress.items()} == {0: 1, 1: 4}
    for p in run.progress.values():
        assert 0 < p.started <= p.first <= p.last


class Reader(ScriptedExecutor):
    """Reads what each request is fed, as a stage's caches would see it."""

    def __init__(self, tokens: Mapping[int, Sequence[int]]) -> None:
        super().__init__(specs(1)[0], lambda request, made: tokens[request][made])
        self.fed: dict[int, list[int]] = defaultdict(list)
        self._padded: dict[int, list[int]] = {}  # real tokens still to come, while padded

    def run(self, step: Step) -> Step | Tokens:
        answer = super().run(step)
        for operation in step.operations:
            match operation:
                case Prepare(handle, lengths, right_padding):
                    assert len({a + b for a, b in zip(lengths, right_padding, strict=True)}) == 1
                    self._padded[handle] = list(lengths)
                case Finalize(handle):
                    assert set(self._padded.pop(handle)) == {0}
        if step.tensors:
            tensor = step.tensors["tokens"]
            self._feed(step.slot, np.frombuffer(tensor.data, "<i4").reshape(tensor.shape).tolist())
        return answer

    def _feed(self, slot: int, rows: list[list[int]]) -> None:
        left = self._padded.get(slot, [len(rows[0])] * len(rows))
        for i, (who, tokens) in enumerate(zip(self.rows[slot], rows, strict=True)):
            real, padding = tokens[: left[i]], tokens[left[i] :]
            assert not any(padding)
            self.fed[who] += real
            left[i] -= len(real)


PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(100, 200), min_size=1, max_size=12),  # the prompt
        st.integers(0, 6),  # tokens before the end token
        st.integers(1, 5),  # max_tokens
    ),
    min_size=1,
    max_size=6,
)


@given(PROMPTS, st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))
def test_every_request_gets_exactly_its_own_tokens(
    prompts: list[tuple[list[int], int, int]], rows: int, chunk: int, credits: int
) -> None:
    """Whatever prompts share a slot, each is fed its prompt and its own tokens, in order."""
    numbers = itertools.count(1000)
    scripts = {i: [*itertools.islice(numbers, n), END] for i, (_, n, _) in enumerate(prompts)}
    reader = Reader(scripts)
    pipeline = DirectPipeline([reader], credits)
    requests = [Request(i, tuple(p), limit) for i, (p, _, limit) in enumerate(prompts)]
    events: dict[int, list[Token]] = defaultdict(list)
    for event in generation(pipeline, requests, rows, chunk):
        events[event.index].append(event)
    for index, (prompt, count, limit) in enumerate(prompts):
        text = [event.token for event in events[index] if event.token is not None]
        assert text == scripts[index][:-1][:limit]
        assert events[index][-1].finish_reason == ("length" if limit <= count else "stop")
        assert all(event.finish_reason is None for event in events[index][:-1])
        fed = [*prompt, *text]
        assert reader.fed[index] == (fed[:-1] if limit <= count else fed)
    assert max(pipeline.in_flight) <= credits
    assert reader.rows == {}, "every batch is released"
