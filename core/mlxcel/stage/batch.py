"""The batches that a stage holds, and the batch operations applied to them.

The arithmetic of joining, padding and filtering caches is mlx-lm's own; this module only
replays it in the order the engine decided, which keeps every stage's rows aligned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import attrs

from mlxcel.family.transformer import Cache
from mlxcel.pipeline.operations import (
    Copy,
    Extend,
    Extract,
    Filter,
    Finalize,
    Merge,
    New,
    Operation,
    Prepare,
    Release,
    Sampling,
    Trim,
)
from mlxcel.stage.grammar import Matcher

Caches = list[Cache | None]
"""One per own layer of a stage, None for a layer without a cache."""

MakeMatcher = Callable[[str, tuple[int, ...]], Matcher]
"""From a grammar and the tokens that end a text to the matcher of a new row."""


@attrs.frozen
class Row:
    """One sequence of a batch: who it is, how it samples, how many tokens it has seen.

    ``prompt`` and ``drawn`` are its token ids, kept only where the sampling looks back.
    ``matcher`` is its place in its grammar, where it has one; it changes with each token.
    """

    request: int
    sampling: Sampling
    position: int = 0
    prompt: tuple[int, ...] = ()
    drawn: tuple[int, ...] = ()
    matcher: Matcher | None = attrs.field(default=None, eq=False)


@attrs.define
class Batch:
    """The caches of a stage's layers for several sequences, and one :class:`Row` for each.

    ``padded`` holds, between prepare and finalize, how many real tokens each row still has
    to come.
    """

    caches: Caches
    rows: list[Row]
    padded: list[int] | None = None

    def advance(self, length: int) -> None:
        """Count the ``length`` columns of a step into each row's position."""
        left = self.padded or [length] * len(self.rows)
        real = [min(length, n) for n in left]
        self.rows = [
            attrs.evolve(row, position=row.position + n)
            for row, n in zip(self.rows, real, strict=True)
        ]
        if self.padded is not None:
            self.padded = [n - r for n, r in zip(self.padded, real, strict=True)]

    def note(self, tokens: list[int]) -> None:
        """Tell what was drawn, negative for failures, to the rows whose next draw depends on it."""
        self.rows = [
            attrs.evolve(row, drawn=(*row.drawn, token)) if row.sampling.looks_back else row
            for row, token in zip(self.rows, tokens, strict=True)
        ]
        for row, token in zip(self.rows, tokens, strict=True):
            if row.matcher is not None and token >= 0:
                row.matcher.take(token)


class BatchTable:
    """A stage's batches by handle.

    Args:
        make_caches: Empty caches for one sequence.
        make_matcher: For rows with a grammar; None on stages that draw no tokens.
    """

    def __init__(
        self, make_caches: Callable[[], Caches], make_matcher: MakeMatcher | None = None
    ) -> None:
        self._make_caches = make_caches
        self._make_matcher = make_matcher
        self._batches: dict[int, Batch] = {}

    def __getitem__(self, handle: int) -> Batch:
        return self._batches[handle]

    def __len__(self) -> int:
        return len(self._batches)

    def requests(self, handle: int) -> tuple[int, ...]:
        """The requests of the batch under ``handle``; none if there is no such batch."""
        batch = self._batches.get(handle)
        return tuple(row.request for row in batch.rows) if batch else ()

    def apply(self, operation: Operation) -> None:
        """Carry out one operation.

        Raises:
            KeyError: It names a handle that this stage does not hold.
        """
        table = self._batches
        match operation:
            case New(handle, request, sampling, prompt, source, grammar, ends):
                if source is None:
                    caches, position = self._make_caches(), 0
                else:
                    caches = copy.deepcopy(table[source].caches)
                    position = table[source].rows[0].position
                matcher = None
                if grammar is not None and self._make_matcher is not None:
                    matcher = self._make_matcher(grammar, ends)
                row = Row(request, sampling, position, prompt, matcher=matcher)
                table[handle] = Batch(caches, [row])
            case Merge(handle, sources):
                table[handle] = _merge([table.pop(source) for source in sources])
            case Extend(handle, source):
                _extend(table[handle], table.pop(source))
            case Filter(handle, rows):
                _filter(table[handle], list(rows))
            case Extract(handle, source, row):
                table[handle] = _extract(table[source], row)
            case Copy(handle, source):
                table[handle] = copy.deepcopy(table[source])
            case Trim(handle, tokens):
                _trim(table[handle], tokens)
            case Prepare(handle, lengths, right_padding):
                _prepare(table[handle], list(lengths), list(right_padding))
            case Finalize(handle):
                _finalize(table[handle])
            case Release(handle):
                table.pop(handle, None)


def _merge(batches: list[Batch]) -> Batch:
    columns = zip(*(batch.caches for batch in batches), strict=True)
    caches = [None if c[0] is None else c[0].merge(list(c)) for c in columns]
    return Batch(caches, [row for batch in batches for row in batch.rows])


def _extend(batch: Batch, other: Batch) -> None:
    for mine, theirs in zip(batch.caches, other.caches, strict=True):
        if mine is not None:
            mine.extend(theirs)
    batch.rows += other.rows


def _filter(batch: Batch, rows: list[int]) -> None:
    for cache in _present(batch):
        cache.filter(rows)
    batch.rows = [batch.rows[row] for row in rows]


def _extract(batch: Batch, row: int) -> Batch:
    caches = [None if cache is None else cache.extract(row) for cache in batch.caches]
    copied = attrs.evolve(batch.rows[row], matcher=copy.deepcopy(batch.rows[row].matcher))
    return Batch(caches, [copied])


def _trim(batch: Batch, tokens: int) -> None:
    for cache in _present(batch):
        cache.trim(tokens)
    batch.rows = [attrs.evolve(row, position=row.position - tokens) for row in batch.rows]


def _prepare(batch: Batch, lengths: list[int], right_padding: list[int]) -> None:
    for cache in _present(batch):
        cache.prepare(lengths=lengths, right_padding=right_padding)
    batch.padded = lengths


def _finalize(batch: Batch) -> None:
    for cache in _present(batch):
        cache.finalize()
    batch.padded = None


def _present(batch: Batch) -> list[Cache]:
    return [cache for cache in batch.caches if cache is not None]
