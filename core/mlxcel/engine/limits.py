"""What an operator allows, and the slots and steps that follow from it."""

from __future__ import annotations

import math

import attrs

from mlxcel.family.batching import Batching


@attrs.frozen
class Limits:
    """What an operator allows.

    ``parallel`` sequences at once, ``batch`` rows in one step at most, ``micro_batch`` rows a
    slot is filled up to (None: as many slots as stages, or as they need), ``chunk`` prompt tokens
    in one step.
    With ``equal``, only prompts of one length are in one step.
    """

    parallel: int = 32
    batch: int = 32
    micro_batch: int | None = None
    chunk: int = 512
    equal: bool = False

    def fitting(self, batching: Batching) -> Limits:
        """The same as far as a model of this ``batching`` allows."""
        if batching is Batching.SINGLE:
            return attrs.evolve(self, batch=1, micro_batch=1)
        return attrs.evolve(self, equal=batching is Batching.EQUAL)


def slots_for(stages: int, limits: Limits) -> int:
    """The slots that circulate: one a stage at least, and a place for every sequence."""
    rows = min(limits.batch, limits.micro_batch or limits.batch)
    return max(stages, math.ceil(limits.parallel / rows))


def credits_for(stages: int, limits: Limits) -> int:
    """Steps in flight at most: one a slot, two chunks a stage, one that gives batches back."""
    return slots_for(stages, limits) + 2 * stages + 1
