"""A slot: the requests of one micro-batch and the steps that it has still to send."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from mlxcel.errors import UsageError
from mlxcel.family.batching import Batching
from mlxcel.pipeline.operations import Finalize, Merge, New, Operation, Prepare, Sampling, Trim
from mlxcel.pipeline.schedule import suggested_micro_batch_size
from mlxcel.wire.tensor import WireTensor


@attrs.frozen
class Request:
    """One prompt: its token ids, how many tokens to make at most, how to draw them.

    ``stop`` are strings that end the text; with ``ignore_end`` the model's end tokens do not.
    ``grammar`` is what the text must match, in llguidance's own notation.
    """

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = attrs.field(factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    grammar: str | None = None


@attrs.frozen
class Work:
    """A step before it has a number: operations, token ids [rows, length], whether to sample."""

    operations: tuple[Operation, ...]
    tokens: Sequence[Sequence[int]]
    sample: bool


@attrs.define
class Slot:
    """One micro-batch under ``handle``; ``ready`` are the steps that it can send."""

    handle: int
    rows: list[Request]
    ready: deque[Work]


@attrs.frozen
class Start:
    """Where a prompt begins that is known in part: a copy of ``source``, less ``trim`` tokens.

    ``cached`` tokens of the prompt are then there.
    """

    source: int
    trim: int
    cached: int


def prompt_work(
    handle: int,
    requests: Sequence[Request],
    chunk: int,
    handles: Iterator[int],
    start: Start | None = None,
    ends: tuple[int, ...] = (),
) -> list[Work]:
    """The steps that bring ``requests`` into the batch ``handle``.

    First the prompts without their last tokens, in chunks of at most ``chunk`` columns, then
    the last tokens as a step of their own, which samples. Prompts of different length are
    padded on the right; ``Finalize`` then moves the padding to the left, where decoding
    wants it.

    Args:
        handles: Fresh handles for the single rows before they are merged.
        start: What is known of the prompt already, for a single request.
        ends: The tokens that end a text, for requests with a grammar.
    """
    lengths = [len(request.prompt) - 1 for request in requests]
    ragged = len(set(lengths)) > 1
    bounds = _bounds(max(lengths), chunk, ragged=ragged)
    operations = _join(handle, requests, handles, ends)
    if start is not None:
        operations = _resume(handle, requests[0], start, ends)
        bounds = [start.cached, *(b for b in bounds if b > start.cached)]
    if ragged:
        padding = [bounds[-1] - length for length in lengths]
        operations.append(Prepare(handle, tuple(lengths), tuple(padding)))
    work = []
    for first, end in itertools.pairwise(bounds):
        tokens = [
            [request.prompt[i] if i < length else 0 for i in range(first, end)]
            for request, length in zip(requests, lengths, strict=True)
        ]
        work.append(Work(tuple(operations), tokens, sample=False))
        operations = []
    if ragged:
        operations.append(Finalize(handle))
    last = [[request.prompt[-1]] for request in requests]
    return [*work, Work(tuple(operations), last, sample=True)]


def _bounds(longest: int, chunk: int, *, ragged: bool) -> list[int]:
    """Where the chunks of ``longest`` columns begin and end.

    A rotating cache takes a step of one column for decoding, which it refuses amid padding;
    so a padded prompt whose last chunk would be one column gets a second one, all padding.
    """
    if ragged:
        chunk = max(chunk, 2)
        longest += longest % chunk == 1
    return [*range(0, longest, chunk), longest] if longest else [0]


def token_tensor(tokens: Sequence[Sequence[int]]) -> WireTensor:
    """Token ids as the first stage receives them: int32 [rows, length]."""
    ids = np.array(tokens, dtype="<i4")
    return WireTensor("int32", ids.shape, ids.tobytes())


def micro_batch_size(prompts: int, stages: int, asked: int | None) -> int:
    """Rows of one slot: what was asked for, or so many that there are as many slots as stages.

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


def micro_batches(
    requests: Sequence[Request], rows: int, batching: Batching
) -> Iterator[list[Request]]:
    """``requests`` in their order, in groups of up to ``rows`` that may share a slot."""
    group: list[Request] = []
    for request in requests:
        unlike = group and len(request.prompt) != len(group[0].prompt)
        apart = batching is Batching.SINGLE or (batching is Batching.EQUAL and unlike)
        if group and (apart or len(group) == rows):
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def credits_for(prompts: int, stages: int, rows: int) -> int:
    """Steps in flight at most: one a slot, and enough for prompt chunks to fill the stages."""
    return max(math.ceil(prompts / rows), 2 * stages)


def _join(
    handle: int, requests: Sequence[Request], handles: Iterator[int], ends: tuple[int, ...]
) -> list[Operation]:
    """One row is a batch as it is; several are made one by one and merged."""
    if len(requests) == 1:
        return [_new(handle, requests[0], ends)]
    singles = [next(handles) for _ in requests]
    new = [_new(single, request, ends) for single, request in zip(singles, requests, strict=True)]
    return [*new, Merge(handle, tuple(singles))]


def _resume(handle: int, request: Request, start: Start, ends: tuple[int, ...]) -> list[Operation]:
    new = attrs.evolve(_new(handle, request, ends), source=start.source)
    return [new, Trim(handle, start.trim)] if start.trim else [new]


def _new(handle: int, request: Request, ends: tuple[int, ...]) -> New:
    prompt = request.prompt if request.sampling.looks_back else ()
    return New(
        handle,
        request.index,
        request.sampling,
        prompt,
        grammar=request.grammar,
        ends=ends if request.grammar is not None else (),
    )
