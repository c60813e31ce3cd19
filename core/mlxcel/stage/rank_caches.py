"""One layer's caches of several ranks that are one worker."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mlxcel.family.transformer import Cache


class RankCaches:
    """The caches of all ranks, which go through every batch operation together.

    Where it is asked like a cache (for masks and positions) it answers as the first one: they
    differ in what they hold, not in how much of it.
    """

    def __init__(self, each: Sequence[Cache]) -> None:
        self.each = list(each)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "each":  # nothing that copying and pickling ask for
            raise AttributeError(name)
        return getattr(self.each[0], name)

    def __getitem__(self, index: int) -> Any:
        return self.each[0][index]

    def __deepcopy__(self, memo: dict[int, Any]) -> RankCaches:
        # Each by itself: two ranks that begin with the same empty cache do not go on sharing it.
        return RankCaches([copy.deepcopy(cache) for cache in self.each])

    @property
    def state(self) -> list[Any]:
        """The arrays of all ranks."""
        return [cache.state for cache in self.each]

    @property
    def nbytes(self) -> int:
        """The bytes of all ranks."""
        return sum(cache.nbytes for cache in self.each)

    def merge(self, caches: Sequence[RankCaches]) -> RankCaches:
        """One batch of ``caches``, rows in that order, as mlx-lm's caches make it."""
        columns = zip(*(cache.each for cache in caches), strict=True)
        return RankCaches([column[0].merge(list(column)) for column in columns])

    def extend(self, other: RankCaches) -> None:
        """Append the rows of ``other``."""
        for mine, theirs in zip(self.each, other.each, strict=True):
            mine.extend(theirs)

    def filter(self, rows: list[int]) -> None:
        """Keep only ``rows``."""
        for cache in self.each:
            cache.filter(rows)

    def extract(self, row: int) -> RankCaches:
        """A copy of one row."""
        return RankCaches([cache.extract(row) for cache in self.each])

    def trim(self, tokens: int) -> None:
        """Forget the last positions."""
        for cache in self.each:
            cache.trim(tokens)

    def prepare(self, **padding: Any) -> None:
        """Take padding on the right from now on."""
        for cache in self.each:
            cache.prepare(**padding)

    def finalize(self) -> None:
        """Move the padding to the left."""
        for cache in self.each:
            cache.finalize()
