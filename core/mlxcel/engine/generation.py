"""Generate from several prompts at once: the slots of a pipeline and who sits in them.

A *slot* is one micro-batch with at most one decode step in flight; with as many slots as
stages, every stage has work. The chunks of a long prompt need no answer from the last
stage, so they follow each other through the stages.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import attrs
import numpy as np

from mlxcel.errors import StageError, UsageError
from mlxcel.pipeline.operations import (
    Filter,
    Finalize,
    Merge,
    New,
    Operation,
    Prepare,
    Release,
    Sampling,
)
from mlxcel.pipeline.pipeline import Pipeline
from mlxcel.pipeline.schedule import suggested_micro_batch_size
from mlxcel.pipeline.step import Step, StepFailed, Tokens
from mlxcel.wire.tensor import WireTensor

FinishReason = Literal["stop", "length"]


@attrs.frozen
class Request:
    """One prompt: its token ids, how many tokens to make at most, how to draw them."""

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()


@attrs.frozen
class Token:
    """One generated token of the request ``index``.

    ``token`` is None when the model ended the text: the end token itself is no text.
    """

    index: int
    token: int | None
    finish_reason: FinishReason | None = None


@attrs.frozen
class Timing:
    """When a request's first step went out, its first token and its last token came."""

    started: float
    first: float
    last: float


@attrs.define
class Slot:
    """One micro-batch: its handle, the requests in its rows, the steps still to send."""

    handle: int
    rows: list[Request]
    ready: deque[Work]
    in_flight: int = 0


@attrs.frozen
class Work:
    """A step before it has a number: operations, token ids [rows, length], whether to sample."""

    operations: tuple[Operation, ...]
    tokens: Sequence[Sequence[int]]
    sample: bool


def micro_batch_size(prompts: int, stages: int, asked: int | None) -> int:
    """Rows of one slot: what was asked for, or as many slots as stages.

    Raises:
        UsageError: Less than one row was asked for.
    """
    if asked is None:
        return suggested_micro_batch_size(prompts, stages)
    if asked < 1:
        raise UsageError(
            f"--pp-micro-batch-size {asked} leaves a slot without a sequence.",
            "Give 1 or more, or auto.",
        )
    return asked


def credits_for(prompts: int, stages: int, rows: int) -> int:
    """Steps in flight at most: one a slot, and enough for prompt chunks to fill the stages."""
    return max(math.ceil(prompts / rows), 2 * stages)


def token_tensor(tokens: Sequence[Sequence[int]]) -> WireTensor:
    """Token ids as the first stage receives them: int32 [rows, length]."""
    ids = np.array(tokens, dtype="<i4")
    return WireTensor("int32", ids.shape, ids.tobytes())


class Generation:
    """One run over a list of requests.

    Args:
        pipeline: Started, with nothing else using it.
        requests: At least one; each with a prompt of at least one token.
        end_tokens: Token ids that end a text.
        rows: Rows of a slot.
        chunk: Tokens of a prompt that one step carries at most.

    Attributes:
        timings: Per request index, once its last token came.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        requests: Sequence[Request],
        *,
        end_tokens: Iterable[int],
        rows: int,
        chunk: int,
    ) -> None:
        self.timings: dict[int, Timing] = {}
        self._pipeline = pipeline
        self._end_tokens = frozenset(end_tokens)
        self._handles = itertools.count()
        self._seq = itertools.count()
        self._made: dict[int, int] = {request.index: 0 for request in requests}
        self._limits = {request.index: request.max_tokens for request in requests}
        self._started: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self.slots = [
            self._fill(list(requests[i : i + rows]), chunk) for i in range(0, len(requests), rows)
        ]

    def __iter__(self) -> Iterator[Token]:
        """The tokens of all requests as they come.

        Raises:
            StageError: A stage could not run a step.
            DeadlineError: The pipeline did not answer in time.
        """
        slots = {slot.handle: slot for slot in self.slots}
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
            slot = slots[answer.slot]
            slot.in_flight -= 1
            yield from self._take(slot, answer)

    def _fill(self, rows: list[Request], chunk: int) -> Slot:
        """A slot with the steps of its prompts: chunks, then the last token as its own step.

        Prompts of different length are padded on the right; ``Finalize`` then moves the
        padding to the left, where decoding wants it.
        """
        handle = next(self._handles)
        lengths = [len(request.prompt) - 1 for request in rows]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        operations: list[Operation] = []
        if len(rows) == 1:
            operations.append(New(handle, rows[0].index, rows[0].sampling))
        else:
            singles = [next(self._handles) for _ in rows]
            operations += [
                New(single, request.index, request.sampling)
                for single, request in zip(singles, rows, strict=True)
            ]
            operations.append(Merge(handle, tuple(singles)))
        ready: deque[Work] = deque()
        ragged = any(padding)
        if ragged:
            operations.append(Prepare(handle, tuple(lengths), tuple(padding)))
        for start in range(0, longest, chunk):
            stop = min(start + chunk, longest)
            tokens = [
                [r.prompt[i] if i < n else 0 for i in range(start, stop)]
                for r, n in zip(rows, lengths, strict=True)
            ]
            ready.append(Work(tuple(operations), tokens, sample=False))
            operations = []
        if ragged:
            operations.append(Finalize(handle))
        ready.append(Work(tuple(operations), [[r.prompt[-1]] for r in rows], sample=True))
        return Slot(handle, rows, ready)

    def _send(self, turns: deque[Slot], free: int) -> int:
        """Send what is ready, one step a slot in turn, while credits last."""
        sent = 0
        for _ in range(len(turns) * max(free, 0)):
            if sent == free or not any(slot.ready for slot in turns):
                break
            slot = turns[0]
            turns.rotate(-1)
            if not slot.ready:
                continue
            work = slot.ready.popleft()
            now = time.perf_counter()
            for request in slot.rows:
                self._started.setdefault(request.index, now)
            tensors = {"tokens": token_tensor(work.tokens)} if work.tokens else {}
            self._pipeline.submit(
                Step(next(self._seq), slot.handle, work.operations, tensors, work.sample)
            )
            slot.in_flight += 1
            sent += 1
        return sent

    def _take(self, slot: Slot, answer: Tokens) -> Iterator[Token]:
        """The tokens of one answer, and the slot's next step if any row goes on."""
        if not answer.tokens:
            return
        now = time.perf_counter()
        keep: list[int] = []
        for row, (request, token) in enumerate(zip(slot.rows, answer.tokens, strict=True)):
            event = self._judge(request.index, token)
            self._first.setdefault(request.index, now)
            if event.finish_reason is None:
                keep.append(row)
            else:
                began = self._started[request.index]
                self.timings[request.index] = Timing(began, self._first[request.index], now)
            yield event
        if not keep:
            slot.rows = []
            slot.ready.append(Work((Release(slot.handle),), (), sample=False))
            return
        operations: tuple[Operation, ...] = ()
        if len(keep) < len(slot.rows):
            operations = (Filter(slot.handle, tuple(keep)),)
            slot.rows = [slot.rows[row] for row in keep]
        slot.ready.append(Work(operations, [[answer.tokens[row]] for row in keep], sample=True))

    def _judge(self, index: int, token: int) -> Token:
        if token in self._end_tokens:
            return Token(index, None, "stop")
        self._made[index] += 1
        done = self._made[index] >= self._limits[index]
        return Token(index, token, "length" if done else None)
