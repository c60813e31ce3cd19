"""The batches of a stage and the operations on them, with caches that are plain lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from mlxcel.stage.batch import BatchTable, Row

SAMPLING = Sampling(temperature=1.0, seed=5)


class ListCache:
    """One list of tokens per row, with the operations that mlx-lm's caches have."""

    def __init__(self, rows: list[list[int]] | None = None) -> None:
        self.rows = [[]] if rows is None else rows
        self.calls: list[Any] = []

    @classmethod
    def merge(cls, caches: list[ListCache]) -> ListCache:
        return cls([list(row) for cache in caches for row in cache.rows])

    def extend(self, other: ListCache) -> None:
        self.rows += other.rows

    def filter(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def extract(self, row: int) -> ListCache:
        return ListCache([list(self.rows[row])])

    def trim(self, tokens: int) -> None:
        self.rows = [row[: len(row) - tokens] for row in self.rows]

    def prepare(self, *, lengths: list[int], right_padding: list[int]) -> None:
        self.calls.append(("prepare", lengths, right_padding))

    def finalize(self) -> None:
        self.calls.append("finalize")


def table(*operations: Operation) -> BatchTable:
    """A table of batches with one layer with a cache and one without, after ``operations``."""
    batches = BatchTable(lambda: [ListCache(), None])
    for operation in operations:
        batches.apply(operation)
    return batches


def new(handle: int) -> New:
    """A batch whose request has the number of the handle times ten."""
    return New(handle, 10 * handle, SAMPLING)


def feed(batches: BatchTable, handle: int, tokens: list[int]) -> None:
    """One step of one token per row."""
    batch = batches[handle]
    for row, token in zip(batch.caches[0].rows, tokens, strict=True):
        row.append(token)
    batch.advance(1)


def content(batches: BatchTable, handle: int) -> list[tuple[int, int, list[int]]]:
    """Request, position and tokens of each row."""
    batch = batches[handle]
    assert batch.caches[1] is None
    rows = zip(batch.rows, batch.caches[0].rows, strict=True)
    return [(row.request, row.position, tokens) for row, tokens in rows]


def test_new() -> None:
    """A new batch has one row of its request, at position 0, and empty caches."""
    batches = table(new(1))
    assert batches[1].rows == [Row(10, SAMPLING, 0)]
    assert content(batches, 1) == [(10, 0, [])]


def test_new_batches_share_no_cache() -> None:
    """Feeding one batch leaves the others as they are."""
    batches = table(new(1), new(2))
    feed(batches, 1, [5])
    assert content(batches, 1) == [(10, 1, [5])]
    assert content(batches, 2) == [(20, 0, [])]


def test_merge() -> None:
    """Rows stand in the order of the sources, which are gone."""
    batches = table(new(1), new(2), new(3))
    feed(batches, 2, [5])
    batches.apply(Merge(0, (3, 2)))
    assert content(batches, 0) == [(30, 0, []), (20, 1, [5])]
    assert len(batches) == 2


def test_extend() -> None:
    """The rows of the source come last, and the source is gone."""
    batches = table(new(1), new(2), Merge(0, (1, 2)), new(3), Extend(0, 3))
    feed(batches, 0, [7, 8, 9])
    assert content(batches, 0) == [(10, 1, [7]), (20, 1, [8]), (30, 1, [9])]
    assert len(batches) == 1


def test_filter_keeps_the_given_order() -> None:
    """Only the named rows stay, in the order in which they are named."""
    batches = table(new(1), new(2), new(3), Merge(0, (1, 2, 3)))
    feed(batches, 0, [7, 8, 9])
    batches.apply(Filter(0, (2, 0)))
    assert content(batches, 0) == [(30, 1, [9]), (10, 1, [7])]


def test_extract_and_copy_leave_the_source() -> None:
    """A copy of a row, or of all, goes on without its source."""
    batches = table(new(1), new(2), Merge(0, (1, 2)))
    feed(batches, 0, [7, 8])
    batches.apply(Extract(5, 0, 1))
    batches.apply(Copy(6, 0))
    feed(batches, 5, [1])
    feed(batches, 6, [2, 3])
    assert content(batches, 0) == [(10, 1, [7]), (20, 1, [8])]
    assert content(batches, 5) == [(20, 2, [8, 1])]
    assert content(batches, 6) == [(10, 2, [7, 2]), (20, 2, [8, 3])]


def test_trim() -> None:
    """The last tokens are forgotten, and positions go back with them."""
    batches = table(new(1))
    for token in (1, 2, 3):
        feed(batches, 1, [token])
    batches.apply(Trim(1, 2))
    assert content(batches, 1) == [(10, 1, [1])]


def test_padding_is_no_position() -> None:
    """Between prepare and finalize each row counts its own real tokens, over all chunks."""
    batches = table(new(1), new(2), new(3), Merge(0, (1, 2, 3)), Prepare(0, (5, 2, 0), (0, 3, 5)))
    batch = batches[0]
    positions = []
    for columns in (2, 2, 1):
        batch.advance(columns)
        positions.append([row.position for row in batch.rows])
    assert positions == [[2, 2, 0], [4, 2, 0], [5, 2, 0]]
    batches.apply(Finalize(0))
    batch.advance(1)
    assert [row.position for row in batch.rows] == [6, 3, 1]
    assert batch.caches[0].calls == [("prepare", [5, 2, 0], [0, 3, 5]), "finalize"]


def test_release_can_be_repeated() -> None:
    """A batch that is released is gone; releasing it again changes nothing."""
    batches = table(new(1), new(2), Release(1), Release(1))
    assert len(batches) == 1
    assert batches.requests(1) == ()
    assert batches.requests(2) == (20,)


@pytest.mark.parametrize(
    "operation",
    [
        Merge(0, (1, 9)),
        Extend(1, 9),
        Extend(9, 1),
        Filter(9, (0,)),
        Extract(0, 9, 0),
        Copy(0, 9),
        Trim(9, 1),
        Prepare(9, (1,), (0,)),
        Finalize(9),
    ],
)
def test_unknown_handles(operation: Operation) -> None:
    """An operation on a batch that this stage does not hold is an error."""
    with pytest.raises(KeyError):
        table(new(1)).apply(operation)


@given(st.data())
def test_rows_and_caches_stay_aligned(data: st.DataObject) -> None:
    """Whatever operations come, row i of the caches holds what row i's request was fed."""
    batches = table()
    fed: dict[int, list[int]] = {}
    live: dict[int, list[int]] = {}
    for handle in range(1, data.draw(st.integers(2, 12))):
        kind = data.draw(st.sampled_from(["new", "merge", "extend", "filter", "release"]))
        picked = data.draw(st.permutations(sorted(live)))[:2]
        if kind == "new" or len(picked) < 2:
            batches.apply(New(handle, handle, SAMPLING))
            live[handle], fed[handle] = [handle], []
        elif kind == "merge":
            batches.apply(Merge(handle, tuple(picked)))
            live[handle] = [row for source in picked for row in live.pop(source)]
        elif kind == "extend":
            batches.apply(Extend(picked[0], picked[1]))
            live[picked[0]] += live.pop(picked[1])
        elif kind == "filter":
            rows = live[picked[0]]
            kept = data.draw(st.permutations(range(len(rows))))[: max(1, len(rows) - 1)]
            batches.apply(Filter(picked[0], tuple(kept)))
            live[picked[0]] = [rows[row] for row in kept]
        else:
            batches.apply(Release(picked[0]))
            del live[picked[0]]
        for held, requests in live.items():
            feed(batches, held, [100 * request + handle for request in requests])
            for request in requests:
                fed[request].append(100 * request + handle)
            assert batches.requests(held) == tuple(requests)
            assert content(batches, held) == [(r, len(fed[r]), fed[r]) for r in requests]
    assert len(batches) == len(live)
