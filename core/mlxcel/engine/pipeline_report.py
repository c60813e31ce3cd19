"""What a run says of its stages: layers, bytes, and the shares of time at work and idle."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from mlxcel.partition.plan import Plan
from mlxcel.partition.ranges import format_ranges
from mlxcel.pipeline.pipeline import StageStatus
from mlxcel.pipeline.schedule import circulating_bubble


@attrs.frozen
class StageReport:
    """What a run says of one stage; ``layers`` as ``--pp-layers`` writes them."""

    stage: int
    layers: str
    bytes: int
    busy: float
    bubble: float


@attrs.frozen
class PipelineReport:
    """All stages of a run, and the bubble that the schedule's own arithmetic expects."""

    stages: tuple[StageReport, ...]
    expected_bubble: float

    @property
    def mean_bubble(self) -> float:
        return sum(stage.bubble for stage in self.stages) / len(self.stages)


def pipeline_report(plan: Plan, statuses: Sequence[StageStatus], slots: int) -> PipelineReport:
    """The measured shares of each stage beside the expected one of ``slots`` circulating slots."""
    return PipelineReport(
        tuple(
            StageReport(
                status.stage,
                format_ranges([stage.layer_range]),
                status.bytes,
                status.busy_fraction,
                status.bubble_fraction,
            )
            for stage, status in zip(plan.stages, statuses, strict=True)
        ),
        circulating_bubble(len(plan.stages), slots),
    )
