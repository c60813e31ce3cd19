"""What a run says of its stages."""

from __future__ import annotations

from mlxcel.engine.pipeline_report import PipelineReport, StageReport, pipeline_report
from mlxcel.partition.assignment import assign
from mlxcel.partition.plan import Plan
from mlxcel.partition.profile import LayerProfile, ModelProfile
from mlxcel.pipeline.pipeline import StageStatus


def test_pipeline_report() -> None:
    """Per stage its layers, bytes and shares; the expected bubble is that of the slots."""
    profile = ModelProfile((LayerProfile(1, 1),) * 6)
    plan = Plan(profile, assign(profile, [range(1), range(1, 6)]))
    statuses = [StageStatus(0, 10, 3.0, 4.0), StageStatus(1, 20, 2.0, 4.0)]
    report = pipeline_report(plan, statuses, slots=1)
    assert report == PipelineReport(
        (StageReport(0, "0", 10, 0.75, 0.25), StageReport(1, "1-5", 20, 0.5, 0.5)), 0.5
    )
    assert report.mean_bubble == 0.375
    assert pipeline_report(plan, statuses, slots=2).expected_bubble == 0.0
