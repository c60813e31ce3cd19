"""``--verbose``: how evenly the layers were divided, once all stages have loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlxcel.partition.report import PartitionQualityReport

if TYPE_CHECKING:
    from mlxcel.engine.model import Model
    from mlxcel.engine.service import RunModel
    from mlxcel.pipeline.pipeline import OnProgress
    from mlxcel.pipeline.workers import WorkerPipeline


def quality(model: Model, pipeline: WorkerPipeline) -> str:
    """The report on how even the stages are, with the bytes each of them really loaded."""
    each = model.tensor.size if model.apart else 1  # the plan's figures are of one worker
    actual = [stage.bytes // each for stage in pipeline.loaded]
    plan = model.plan
    report = PartitionQualityReport(plan.stages, plan.profile.groups).with_actual(actual)
    warning = report.warning()
    return "\n".join([*report.lines(), *([warning] if warning else [])])


@contextmanager
def telling_quality(
    run: RunModel, model: Model, *, credits: int, on_progress: OnProgress
) -> Iterator[WorkerPipeline]:
    """Run ``model`` by ``run``, and print the report to standard error when it has loaded."""
    with run(credits=credits, on_progress=on_progress) as pipeline:
        print(quality(model, pipeline), file=sys.stderr, flush=True)
        yield pipeline
