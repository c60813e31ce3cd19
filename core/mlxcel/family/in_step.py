"""Blocks whose ranks have to add something up before they can go on.

Most blocks of a layer end with what tensor-parallel ranks add up: each rank's block runs by
itself. Where a norm amid the block reads a sum over all channels, the block is a generator
besides: ``in_step``, with the arguments of ``__call__``, yields its part of the sum, is sent the
sum, and returns its result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

Steps = Generator["mx.array", "mx.array", Any]
"""A block that is running."""


def in_step(blocks: Sequence[Steps], add: Callable[[Sequence[mx.array]], mx.array]) -> list[Any]:
    """Run the ``blocks`` of all ranks side by side; returns the result of each.

    Args:
        add: Adds up what they yield.
    """
    total: Any = None
    while True:
        parts, results = [], []
        for block in blocks:
            try:
                parts.append(block.send(total))
            except StopIteration as end:
                results.append(end.value)
        if results:
            return results
        total = add(parts)


def alone(block: Steps) -> Any:
    """The result of a ``block`` that is whole: what it yields is the sum already."""
    [result] = in_step([block], lambda parts: parts[0])
    return result
