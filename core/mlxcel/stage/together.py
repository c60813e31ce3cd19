"""The blocks of a layer that the ranks of a stage share, and how their results come together.

Source: Shoeybi et al., *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism* (2019). Where all ranks are one worker, their blocks run side by side in one graph;
where each is a worker of its own, there is one block here and collectives add up the rest.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxcel.family.in_step import in_step
from mlxcel.stage.rank_caches import RankCaches
from mlxcel.tensor.collectives import Collectives


class Joint:
    """Puts the results of all ranks together.

    Args:
        ranks: Those that this worker is.
        collectives: Reach the others, if they are workers of their own.
    """

    def __init__(self, ranks: range, collectives: Collectives | None) -> None:
        self.ranks = ranks
        self._collectives = collectives

    @property
    def size(self) -> int:
        """How many ranks there are in all."""
        return len(self.ranks) if self._collectives is None else self._collectives.size

    def add(self, parts: Sequence[mx.array]) -> mx.array:
        """The sum of the own ranks' ``parts`` and those of all others."""
        total = functools.reduce(operator.add, parts)
        return total if self._collectives is None else self._collectives.all_sum(total)

    def side_by_side(self, parts: Sequence[mx.array], total: int) -> mx.array:
        """All ranks' shares of a last axis of ``total``, as :class:`Shard` cuts a vocabulary."""
        if self._collectives is None:
            return mx.concatenate(list(parts), axis=-1)
        [own] = parts
        widest = -(-total // self.size)  # the same for all, as collectives want it
        padding = [(0, 0)] * (own.ndim - 1) + [(0, widest - own.shape[-1])]
        every = self._collectives.all_gather(mx.pad(own, padding))
        sizes = [(r + 1) * total // self.size - r * total // self.size for r in range(self.size)]
        return mx.concatenate([every[r][..., :size] for r, size in enumerate(sizes)], axis=-1)


class Shared(list[Any]):
    """Something that each rank has its own of, on its way from one block to another."""


class Together(nn.Module):
    """In the place of a block: the blocks of the own ranks, their results added up.

    To whoever reads attributes it looks like the first of them.

    Args:
        blocks: One for each own rank.
        joint: Adds their results.
    """

    def __init__(self, blocks: Sequence[nn.Module], joint: Joint) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = list(blocks)
        self._joint = joint

    def __getattr__(self, name: str) -> Any:
        if name in self or "blocks" not in self:
            return super().__getattr__(name)
        return getattr(self["blocks"][0], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole block would return.

        Of a tuple, the first item is added up. The second is each rank's own (Gemma 4: keys and
        values that later layers read), what follows is the same for all. Blocks that have to add
        up something before run in step (:mod:`mlxcel.family.in_step`).
        """
        run = "in_step" if hasattr(self.blocks[0], "in_step") else "__call__"
        results = [
            getattr(block, run)(
                *(_own(value, index) for value in args),
                **{name: _own(value, index) for name, value in kwargs.items()},
            )
            for index, block in enumerate(self.blocks)
        ]
        if run == "in_step":
            results = in_step(results, self._joint.add)
        if not isinstance(results[0], tuple):
            return self._joint.add(results)
        total, own, rest = self._joint.add([r[0] for r in results]), results[0][1], results[0][2:]
        if len(results) > 1:
            own = Shared(result[1] for result in results)
        return (total, own, *rest)


def _own(value: Any, index: int) -> Any:
    """What the rank at ``index`` gets of an argument."""
    if isinstance(value, RankCaches):
        return value.each[index]
    return value[index] if isinstance(value, Shared) else value
