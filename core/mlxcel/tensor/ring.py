"""Collectives over the connections of a rank group, in a ring: rank r sends to r + 1.

All-reduce is reduce-scatter and then all-gather, which sends 2 (N - 1) / N of the array from each
rank (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009). Two ranks exchange everything at once instead: the same bytes in one step. Small arrays of
more ranks go round whole and are added by each: half the steps.

Each number is added in the same order for all ranks, so all have the same bits. float16 and
bfloat16 are added in float32; on the long way they are rounded after each addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import numpy as np

from mlxcel.errors import WireError
from mlxcel.pipeline.group import RankGroup
from mlxcel.tensor.addition import add, total
from mlxcel.tensor.exchange import AHEAD, Exchange, Operation, Take
from mlxcel.tensor.values import NAMES, Values, array_of, empty, values_of
from mlxcel.wire.sealed import CHUNK

WHOLE = 64 << 10
"""Up to how many bytes of an array more than two ranks add whole."""

LARGEST_PIECE = CHUNK - 64
"""With all headers no more than one sealed chunk."""

ROUND = 64
"""Bytes that a piece is a multiple of, so that no number is cut."""


class RingCollectives:
    """See :class:`mlxcel.tensor.collectives.Collectives`; results are there at once, not lazy.

    Args:
        group: Its connections; used by nobody else while an operation runs.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._count = 0
        self._piece = 0  # not agreed yet

    @property
    def rank(self) -> int:
        """This one."""
        return self._group.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._group.size

    def all_sum(self, x: mx.array) -> mx.array:
        """See :meth:`Collectives.all_sum`.

        Raises:
            RankLost: A rank is gone, or was too slow.
            WireError: A rank did something else.
        """
        if self.size == 1:
            return x
        values = values_of(x)
        exchange = self._begin("all-reduce", x.dtype)
        if self.size == 2:
            result = self._add_both(exchange, values, x.dtype)
        elif values.nbytes <= WHOLE:
            result = total(self._gather(exchange, self._places(values)), x.dtype)
        else:
            result = np.empty_like(values)
            shares = np.array_split(result, self.size)
            self._scatter(exchange, np.array_split(values, self.size), shares, x.dtype)
            self._gather(exchange, shares)
        return array_of(result, x.dtype, x.shape)

    def all_gather(self, x: mx.array) -> mx.array:
        """See :meth:`Collectives.all_gather`.

        Raises:
            RankLost: A rank is gone, or was too slow.
            WireError: A rank did something else.
        """
        values = values_of(x)
        parts = self._places(values)
        if self.size > 1:
            self._gather(self._begin("all-gather", x.dtype), parts)
        return array_of(np.concatenate(parts), x.dtype, (self.size, *x.shape))

    def reduce_scatter(self, x: mx.array) -> mx.array:
        """See :meth:`Collectives.reduce_scatter`.

        Raises:
            RankLost: A rank is gone, or was too slow.
            WireError: A rank did something else.
            ValueError: The first dimension cannot be divided by the ranks.
        """
        rows, rest = divmod(x.shape[0], self.size) if x.ndim else (0, 1)
        if rest:
            raise ValueError(f"{self.size} ranks cannot share an array of shape {x.shape}")
        if self.size == 1:
            return x
        parts = np.split(values_of(x), self.size)
        sums = [np.empty_like(part) for part in parts]
        self._scatter(self._begin("reduce-scatter", x.dtype), parts, sums, x.dtype)
        return array_of(sums[self.rank], x.dtype, (rows, *x.shape[1:]))

    def broadcast(self, x: mx.array, root: int) -> mx.array:
        """See :meth:`Collectives.broadcast`.

        Raises:
            RankLost: A rank is gone, or was too slow.
            WireError: A rank did something else.
        """
        if self.size == 1:
            return x
        exchange = self._begin("broadcast", x.dtype)
        place = (self.rank - root) % self.size
        values = values_of(x) if place == 0 else empty(x.size, x.dtype)
        for index in range(exchange.pieces(values)):
            if place > 0:
                exchange.receive(values, index, values.__setitem__)
            if place < self.size - 1:
                exchange.send(values, index)
        return x if place == 0 else array_of(values, x.dtype, x.shape)

    def barrier(self) -> None:
        """See :meth:`Collectives.barrier`.

        Raises:
            RankLost: A rank is gone, or was too slow.
            WireError: A rank did something else.
        """
        if self.size > 1:
            self._gather(self._begin("barrier", mx.uint8), self._places(empty(0, mx.uint8)))

    def watched(self) -> AbstractContextManager[None]:
        """See :meth:`Collectives.watched`; every wait here has a deadline of its own."""
        return nullcontext()

    def close(self) -> None:
        """End the group's connections; harmless when repeated."""
        self._group.close()

    def _begin(self, operation: Operation, dtype: mx.Dtype) -> Exchange:
        """The next operation."""
        if not self._piece:
            self._piece = self._agree()
        self._count += 1
        return Exchange(self._group, operation, self._count, NAMES[dtype], self._piece)

    def _agree(self) -> int:
        """The size of a piece that every rank's connections take: systems differ.

        Raises:
            RankLost: A rank is gone, or was too slow.
            WireError: A rank asks for pieces of no size; the group is closed.
        """
        limit = min(LARGEST_PIECE, self._group.room // AHEAD - 64) // ROUND * ROUND
        exchange = Exchange(self._group, "agreement", 0, "int64", ROUND)
        sizes = self._gather(exchange, self._places(np.array([limit], np.int64)))
        piece = int(min(sizes)[0])
        if piece < ROUND or piece % ROUND:
            self._group.close()
            raise WireError(f"a rank that wants pieces of {piece} bytes")
        return piece

    def _places(self, values: Values) -> list[Values]:
        """A place for the values of each rank; those of this one are there."""
        places = [np.empty_like(values) for _ in range(self.size)]
        places[self.rank] = values
        return places

    def _add_both(self, exchange: Exchange, values: Values, dtype: mx.Dtype) -> Values:
        """The sum of the values of two ranks."""
        result = np.empty_like(values)

        def take(place: slice, part: Values) -> None:
            pair = (values[place], part) if self.rank == 0 else (part, values[place])
            add(*pair, dtype, result[place])

        exchange.both(values, result, take)
        return result

    def _scatter(
        self, exchange: Exchange, parts: Sequence[Values], sums: Sequence[Values], dtype: mx.Dtype
    ) -> None:
        """Put the sum of all ranks' part of this rank's number into that of ``sums``.

        The other ``sums`` are where others' parts are added on their way.
        """
        outgoing = parts[self.rank - 1]
        for step in range(2, self.size + 1):
            index = (self.rank - step) % self.size
            exchange.both(outgoing, parts[index], _adding(parts[index], dtype, sums[index]))
            outgoing = sums[index]

    def _gather(self, exchange: Exchange, parts: list[Values]) -> list[Values]:
        """Fill ``parts``, of which only this rank's is there, and return them."""
        for step in range(self.size - 1):
            incoming = parts[(self.rank - step - 1) % self.size]
            exchange.both(parts[(self.rank - step) % self.size], incoming, incoming.__setitem__)
        return parts


def _adding(own: Values, dtype: mx.Dtype, out: Values) -> Take:
    """Add what comes to ``own``."""

    def take(place: slice, part: Values) -> None:
        add(part, own[place], dtype, out[place])

    return take
