"""Whether the stages of a partition fit their memory: weights and caches against budgets."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from mlxcel.errors import MemoryBudgetError, UsageError
from mlxcel.partition.assignment import StageAssignment, assign
from mlxcel.partition.profile import ModelProfile
from mlxcel.partition.ranges import format_ranges, validate_ranges

Budgets = Sequence[int | None]
"""The bytes that each stage may hold, in the order of the stages; None is unlimited."""

LARGEST = 1 << 50
"""No machine has more bytes of memory than this."""


@attrs.frozen
class MemoryLimits:
    """The memory that was declared for the stages.

    Attributes:
        sizes: Bytes of each stage, or a single size that is each stage's.
        reserve: Bytes of each that neither weights nor KV caches may take.
    """

    sizes: tuple[int, ...]
    reserve: int = 0

    def budgets(self, stages: int) -> tuple[int, ...]:
        """What weights and caches of each of ``stages`` stages may take; positive.

        Raises:
            UsageError: There is neither one size nor one per stage, a size cannot be, or the
                reserve leaves nothing of it.
        """
        if len(self.sizes) not in (1, stages):
            raise UsageError(
                f"--memory gives {len(self.sizes)} sizes for {stages} stage(s).",
                "Give one size for all stages, or one per stage (--pp-size).",
            )
        for size in self.sizes:
            if not 0 < size <= LARGEST:
                raise UsageError(
                    f"--memory of {size} bytes cannot be.", "Give a size such as 16GB or 8GiB."
                )
            if not 0 <= self.reserve < size:
                raise UsageError(
                    f"--reserve of {self.reserve} bytes leaves nothing of --memory {size}.",
                    "Give a smaller reserve.",
                )
        sizes = self.sizes * stages if len(self.sizes) == 1 else self.sizes
        return tuple(size - self.reserve for size in sizes)


def validate_partition(
    ranges: Sequence[range], profile: ModelProfile, budgets: Budgets | None = None
) -> None:
    """Check that ``ranges`` hold each layer once, divide no group and break no budget.

    Raises:
        PartitionError: They do not tile the layers, or divide a group.
        MemoryBudgetError: A stage holds more than its budget; the error is about the stage
            that lacks the most.
    """
    validate_ranges(ranges, len(profile.layers), profile.groups)
    if budgets is None:
        return
    error = overrun(assign(profile, ranges), budgets)
    if error is not None:
        raise error


def overrun(
    stages: Sequence[StageAssignment], budgets: Budgets, *, best: bool = False
) -> MemoryBudgetError | None:
    """The error about the stage that lacks the most memory, or None if none lacks any.

    Args:
        best: Whether no other division of the layers lacks less.
    """
    rooms = {
        stage: budget - stage.total_bytes
        for stage, budget in zip(stages, budgets, strict=True)
        if budget is not None
    }
    worst = min(rooms, key=lambda stage: rooms[stage], default=None)
    if worst is None or rooms[worst] >= 0:
        return None
    return MemoryBudgetError(
        stage=worst.stage_index,
        device=worst.device_id,
        layers=format_ranges([worst.layer_range]),
        needed_bytes=worst.total_bytes,
        kv_bytes=worst.kv_bytes,
        budget_bytes=worst.total_bytes + rooms[worst],
        best=best,
        room=_where_room_is(rooms),
    )


def _where_room_is(rooms: dict[StageAssignment, int]) -> str:
    stage = max(rooms, key=lambda stage: rooms[stage])
    if rooms[stage] <= 0:
        return "No stage has room left."
    return (
        f"The most room is on stage {stage.stage_index} ({stage.device_id}): {rooms[stage]} bytes."
    )
