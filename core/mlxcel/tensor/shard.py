"""How one parameter is split over tensor-parallel ranks (Shoeybi et al., *Megatron-LM*, 2019).

Axes are counted from the end, so that they are the same for the matrix of a linear layer
[outputs, inputs] and for those of stacked experts [experts, outputs, inputs], and for what a
packed matrix has beside it: its scales and biases are split as its weight is. Only the experts
themselves are always the first axis, 0.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

from mlxcel.tensor.options import TensorParallel


class ShardStrategy(enum.Enum):
    """What of a parameter a rank holds."""

    COLUMN = "column"
    """A share of its outputs: each rank makes a part of the result."""

    ROW = "row"
    """A share of its inputs: the ranks' results have to be added."""

    VOCAB = "vocab"
    """A share of the vocabulary; it need not divide."""

    EXPERT = "expert"
    """Whole experts, every one whose number leaves the rank as remainder."""

    REPLICATED = "replicated"
    """All of it."""


@attrs.frozen
class Shard:
    """The share of a rank in one parameter.

    Attributes:
        strategy: What is shared out.
        axis: The axis that is cut, counted from the end; of no meaning for what is replicated.
        units: How many parts the axis consists of that nothing may divide, such as heads; None
            where it may be cut anywhere.
        segments: Sizes of the pieces that the axis is made of, each of them cut by itself and
            of ``units`` parts; empty for a single piece.
        repeats: With fewer units than ranks, several ranks hold the same unit (the keys and
            values of grouped-query attention).
        once: Only one rank adds it: the bias of what is split by rows.
        counted: Attributes of the module or its owner that count what is split, under whichever
            of the names mlx-lm has for them; a rank divides them like the axis.
        at_once: The sum is needed right behind this module, not only behind its block.
        within: The sum is needed right behind this projection, amid its block.
        stacked: It is of a stack of experts.
        what: What the units are, in words for people.
    """

    strategy: ShardStrategy = ShardStrategy.REPLICATED
    axis: int = -2
    units: int | None = None
    segments: tuple[int, ...] = ()
    repeats: bool = False
    once: bool = False
    counted: tuple[str, ...] = ()
    at_once: bool = False
    within: bool = False
    stacked: bool = False
    what: str = "parts"

    def of_bias(self) -> Shard:
        """How the bias of a layer is split whose weight is split like this."""
        if self.strategy is ShardStrategy.ROW:
            return Shard(once=True, stacked=self.stacked)
        axis = -1 if self.axis == -2 else self.axis + 1
        return attrs.evolve(self, axis=axis, counted=(), at_once=False)

    def chosen(self, options: TensorParallel) -> Shard:
        """The same where the operator has chosen how experts are shared out."""
        if self.stacked and options.moe == "expert_parallel":
            return Shard(ShardStrategy.EXPERT, axis=0, stacked=True)
        return self

    def divides(self, size: int, ranks: int, group: int | None = None) -> bool:
        """Whether an axis of ``size`` can be shared out to so many ``ranks``.

        Args:
            group: Inputs of a packed matrix that have one scale, which no rank may divide.
        """
        match self.strategy:
            case ShardStrategy.REPLICATED:
                return True
            case ShardStrategy.VOCAB | ShardStrategy.EXPERT:
                return size >= ranks
        segments = self.segments or (size,)
        whole = group if group is not None and self.strategy is ShardStrategy.ROW else 1
        return all(self._divides(segment, ranks, whole) for segment in segments)

    def parts(self, size: int, rank: int, ranks: int) -> tuple[range, ...]:
        """What ``rank`` of ``ranks`` holds of an axis of ``size``: one range of each segment.

        The axis must be one that :meth:`divides`.
        """
        match self.strategy:
            case ShardStrategy.REPLICATED:
                return (range(size),)
            case ShardStrategy.VOCAB:
                return (range(rank * size // ranks, (rank + 1) * size // ranks),)
            case ShardStrategy.EXPERT:
                return (range(rank, size, ranks),)
        parts, begin = [], 0
        for segment in self.segments or (size,):
            units = self.units or segment
            if units % ranks == 0:
                share, first = segment // ranks, rank * (segment // ranks)
            else:
                share, first = segment // units, rank * units // ranks * (segment // units)
            parts.append(range(begin + first, begin + first + share))
            begin += segment
        return tuple(parts)

    def held(self, shape: Sequence[int], ranks: range, size: int) -> tuple[int, ...]:
        """The shape of what ``ranks``, some of ``size``, hold together of an array of ``shape``.

        The axis must be one that :meth:`divides`. What is replicated they hold once.
        """
        if self.strategy is ShardStrategy.REPLICATED:
            return tuple(shape)
        own, whole = list(shape), shape[self.axis]
        own[self.axis] = sum(len(part) for rank in ranks for part in self.parts(whole, rank, size))
        return tuple(own)

    def _divides(self, segment: int, ranks: int, whole: int) -> bool:
        units = self.units or segment
        if self.repeats and ranks % units == 0:
            return True
        return units % ranks == 0 and segment % (ranks * whole) == 0


REPLICATED = Shard()
VOCAB = Shard(ShardStrategy.VOCAB)


def column(
    units: int | None = None,
    *,
    axis: int = -2,
    segments: tuple[int, ...] = (),
    repeats: bool = False,
    counted: tuple[str, ...] = (),
    what: str = "parts",
) -> Shard:
    """The outputs are shared out; see :class:`Shard` for the arguments."""
    return Shard(ShardStrategy.COLUMN, axis, units, segments, repeats, counted=counted, what=what)


def row(
    units: int | None = None, *, at_once: bool = False, within: bool = False, what: str = "parts"
) -> Shard:
    """The inputs are shared out, so that the results have to be added."""
    return Shard(ShardStrategy.ROW, -1, units, at_once=at_once, within=within, what=what)
