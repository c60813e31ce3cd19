"""A pipeline from its start to its end, with the observers told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlxcel.engine.model import Model
from mlxcel.errors import MlxcelError
from mlxcel.observe.events import StageLoaded, StageStopped
from mlxcel.pipeline.pipeline import OnProgress
from mlxcel.pipeline.workers import WorkerPipeline


@contextmanager
def started(pipeline: WorkerPipeline, model: Model, on_progress: OnProgress) -> Iterator[None]:
    """All stages of ``model`` loaded; whatever happens inside, none is left running."""
    try:
        pipeline.start(on_progress)
        for spec, done in zip(model.specs, pipeline.loaded, strict=True):
            layers = (spec.start, spec.stop)
            model.plugins.observe(StageLoaded(done.stage, layers, done.bytes, done.seconds))
        yield
    except BaseException:
        with suppress(MlxcelError):  # what went wrong first is what is told
            pipeline.stop(drain=False)
        raise
    for status in pipeline.stop():
        model.plugins.observe(StageStopped(status.stage, status.busy_seconds, status.span_seconds))
