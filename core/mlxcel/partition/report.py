"""How even a partition is, in words for the operator."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from mlxcel.family.contract import LayerAdjacencyGroup
from mlxcel.partition.assignment import StageAssignment

IMBALANCE_WARNING = 1.5
"""From this ratio of the heaviest to the lightest stage on, the report warns."""


@attrs.frozen
class PartitionQualityReport:
    """The loads of a partition, estimated and, once the stages have loaded, actual (bytes)."""

    assignments: tuple[StageAssignment, ...]
    groups: tuple[LayerAdjacencyGroup, ...] = ()
    actual_bytes: tuple[int, ...] | None = None

    @property
    def heaviest(self) -> StageAssignment:
        """The stage with the largest estimate, the first of equals."""
        return max(self.assignments, key=lambda stage: stage.estimated_memory_bytes)

    @property
    def max_bytes(self) -> int:
        """The estimate of the heaviest stage."""
        return self.heaviest.estimated_memory_bytes

    @property
    def min_bytes(self) -> int:
        """The estimate of the lightest stage."""
        return min(stage.estimated_memory_bytes for stage in self.assignments)

    @property
    def imbalance(self) -> float:
        """Heaviest over lightest: 1 is even, infinite where a stage holds nothing."""
        if self.max_bytes == self.min_bytes:
            return 1.0
        return self.max_bytes / self.min_bytes if self.min_bytes else float("inf")

    def with_actual(self, actual_bytes: Sequence[int]) -> PartitionQualityReport:
        """The same report with what each stage really loaded."""
        return attrs.evolve(self, actual_bytes=tuple(actual_bytes))

    def lines(self) -> tuple[str, ...]:
        """A line about the whole partition, then one per stage."""
        head = (
            f"pipeline partition quality: {len(self.assignments)} stages, "
            f"max={self.max_bytes} bytes, min={self.min_bytes} bytes, "
            f"imbalance={self.imbalance:.2f}x"
        )
        actual = self.actual_bytes or [None] * len(self.assignments)
        return (head, *map(_stage_line, self.assignments, actual))

    def warning(self) -> str | None:
        """What to tell the operator about an uneven partition, or None if it is even enough."""
        if self.imbalance < IMBALANCE_WARNING:
            return None
        text = (
            f"pipeline auto-partition produced an imbalanced plan: stage byte loads range from "
            f"{self.min_bytes} to {self.max_bytes} ({self.imbalance:.2f}x), "
            f"which may hurt throughput."
        )
        layers = self.heaviest.layer_range
        carried = [group for group in self.groups if group.start in layers]
        if carried:
            group = max(carried, key=lambda group: group.end - group.start)
            text += (
                f" Heaviest stage {self.heaviest.stage_index} carries adjacency group "
                f"{group.start}..{group.end} ({group.reason})."
            )
        return text


def _stage_line(stage: StageAssignment, actual: int | None) -> str:
    estimated = stage.estimated_memory_bytes
    text = (
        f"stage {stage.stage_index} device '{stage.device_id}' layers={len(stage.layer_range)} "
        f"estimated={estimated} actual={'unknown' if actual is None else actual}"
    )
    if actual is not None and estimated:
        text += f" drift={100 * (actual - estimated) / estimated:+.1f}%"
    return text
