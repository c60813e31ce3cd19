"""Generate from several prompts at once by keeping the slots of a pipeline going.

Each slot has at most one decode step in flight; with as many slots as stages, every stage
has work. The chunks of a long prompt need no answer from the last stage, so they follow
each other through the stages.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import attrs

from mlxcel.engine.slot import Request, Slot, Work, micro_batches, prompt_work, token_tensor
from mlxcel.errors import GrammarFailed, LogitsError, StageError
from mlxcel.family.batching import Batching
from mlxcel.pipeline.operations import Filter, Operation, Release
from mlxcel.pipeline.pipeline import Pipeline
from mlxcel.pipeline.step import FAILED_GRAMMAR, FAILED_ROW, Step, StepFailed, Tokens

FinishReason = Literal["stop", "length"]


@attrs.frozen
class Token:
    """One generated token of the request ``index``.

    ``token`` is None when the model ended the text: the end token itself is no text.
    """

    index: int
    token: int | None
    finish_reason: FinishReason | None = None


@attrs.define
class Progress:
    """How far a request is: tokens made, and when its first step left and its tokens came.

    Times are readings of :func:`time.perf_counter`; 0 as long as it has not happened.
    """

    made: int = 0
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0


class Generation:
    """One run over a list of requests; iterate over it for the tokens as they come.

    Args:
        pipeline: Started, with nothing else using it.
        requests: At least one, each with a prompt of at least one token.
        end_tokens: Token ids that end a text.
        rows: Rows of a slot at most.
        chunk: Tokens of a prompt that one step carries at most.
        batching: Which requests may share a slot.

    Attributes:
        slots: The micro-batches.
        progress: Per request index.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        requests: Sequence[Request],
        *,
        end_tokens: Iterable[int],
        rows: int,
        chunk: int,
        batching: Batching = Batching.PADDED,
    ) -> None:
        self.progress = {request.index: Progress() for request in requests}
        self._pipeline = pipeline
        self._end_tokens = frozenset(end_tokens)
        self._seq = itertools.count()
        handles = itertools.count()
        self.slots: list[Slot] = []
        ends = tuple(sorted(self._end_tokens))
        for group in micro_batches(requests, rows, batching):
            handle = next(handles)
            work = prompt_work(handle, group, chunk, handles, ends=ends)
            self.slots.append(Slot(handle, group, deque(work)))

    def __iter__(self) -> Iterator[Token]:
        """The tokens of all requests as they come.

        Raises:
            StageError: A stage could not run a step.
            DeadlineError: The pipeline did not answer in time.
        """
        by_handle = {slot.handle: slot for slot in self.slots}
        turns = deque(self.slots)
        in_flight = 0
        while True:
            in_flight += self._send(turns, self._pipeline.credits - in_flight)
            if in_flight == 0:
                return
            answer = self._pipeline.receive()
            in_flight -= 1
            if isinstance(answer, StepFailed):
                raise StageError(answer.stage, "a step", answer.cause)
            if answer.tokens:
                yield from self._take(by_handle[answer.slot], answer)

    def _send(self, turns: deque[Slot], free: int) -> int:
        """Send what is ready, one step a slot in turn, while credits last."""
        sent = 0
        while sent < free and any(slot.ready for slot in turns):
            slot = turns[0]
            turns.rotate(-1)
            if slot.ready:
                self._submit(slot, slot.ready.popleft())
                sent += 1
        return sent

    def _submit(self, slot: Slot, work: Work) -> None:
        now = time.perf_counter()
        for request in slot.rows:
            self.progress[request.index].started = self.progress[request.index].started or now
        tensors = {"tokens": token_tensor(work.tokens)} if work.tokens else {}
        self._pipeline.submit(
            Step(next(self._seq), slot.handle, work.operations, tensors, work.sample)
        )

    def _take(self, slot: Slot, answer: Tokens) -> Iterator[Token]:
        """The tokens of one answer; what is left of the slot gets its next step."""
        if FAILED_ROW in answer.tokens:
            raise LogitsError()
        if FAILED_GRAMMAR in answer.tokens:
            raise GrammarFailed(answer.causes[0])
        now = time.perf_counter()
        events = [
            self._judge(request, token, now)
            for request, token in zip(slot.rows, answer.tokens, strict=True)
        ]
        keep = [row for row, event in enumerate(events) if event.finish_reason is None]
        if keep:
            operations: tuple[Operation, ...] = ()
            if len(keep) < len(slot.rows):
                operations = (Filter(slot.handle, tuple(keep)),)
            tokens = [[answer.tokens[row]] for row in keep]
            slot.ready.append(Work(operations, tokens, sample=True))
        else:
            slot.ready.append(Work((Release(slot.handle),), (), sample=False))
        slot.rows = [slot.rows[row] for row in keep]
        yield from events

    def _judge(self, request: Request, token: int, now: float) -> Token:
        progress = self.progress[request.index]
        progress.first, progress.last = progress.first or now, now
        if token in self._end_tokens:
            return Token(request.index, None, "stop")
        progress.made += 1
        finished = progress.made >= request.max_tokens
        return Token(request.index, token, "length" if finished else None)
