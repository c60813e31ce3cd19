"""A model on this machine: opened, planned, and run as a pipeline of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import attrs

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.config import read_config
from mlxcel.checkpoint.dtype import DtypeChoice, choose_dtype
from mlxcel.engine.tokenizer import Tokenizer, load_tokenizer
from mlxcel.errors import UnsupportedError
from mlxcel.family.choose import choose_family
from mlxcel.observe.events import StageLoaded, StageStopped
from mlxcel.partition.balance import BalanceBy
from mlxcel.partition.plan import Plan, make_plan
from mlxcel.partition.ranges import format_ranges
from mlxcel.pipeline.link import Link, WireLink
from mlxcel.pipeline.pipeline import OnProgress, StageStatus
from mlxcel.pipeline.schedule import circulating_bubble
from mlxcel.pipeline.threads import ThreadPipeline
from mlxcel.plugins import Plugins
from mlxcel.stage.build import FamilyExecutors
from mlxcel.stage.contract import StageExecutor, StageSpec
from mlxcel.wire.tensor import WireTensor


@attrs.frozen
class LocalModel:
    """A checkpoint with its family, dtype and plan; nothing is loaded yet."""

    checkpoint: Checkpoint
    family: str
    dtype: DtypeChoice
    plan: Plan
    tokenizer: Tokenizer
    plugins: Plugins

    @property
    def specs(self) -> tuple[StageSpec, ...]:
        """What each stage is asked to be."""
        stages = self.plan.stages
        return tuple(
            StageSpec(
                self.checkpoint.path,
                self.family,
                stage.stage_index,
                len(stages),
                stage.layer_range.start,
                stage.layer_range.stop,
                self.dtype.cast,
            )
            for stage in stages
        )

    @property
    def notices(self) -> tuple[str, ...]:
        """One line each for what the user should know before anything loads."""
        return (*self.plugins.notices, *self.checkpoint.notices, self.dtype.notice)


def open_model(
    path: Path,
    plugins: Plugins,
    *,
    dtype: str = "auto",
    size: int | None = None,
    layers: str | None = None,
    by: BalanceBy = "bytes",
) -> LocalModel:
    """Read headers, choose family, dtype and stages; refuse what cannot run.

    Raises:
        CheckpointError: The folder does not hold a readable checkpoint and tokenizer.
        UnsupportedError: No installed family runs it, or not in this dtype.
        PartitionError: The stages asked for are impossible.
    """
    name, family = choose_family(read_config(path), plugins)
    if not family.runnable:
        raise UnsupportedError(
            f"The family {name!r} can be planned but not run yet.",
            "Choose a model of a family that runs; `mlxcel plugins` lists what is installed.",
        )
    checkpoint = family.open(path)
    choice = choose_dtype(checkpoint, dtype, _device())
    plan = make_plan(checkpoint, family, choice, plugins, size=size, layers=layers, by=by)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    return LocalModel(checkpoint, name, choice, plan, tokenizer, plugins)


@contextmanager
def running(
    model: LocalModel,
    *,
    credits: int,
    timeout: float,
    wire: bool = False,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Iterator[ThreadPipeline]:
    """The model's pipeline, loaded; whatever happens inside, nothing is left running.

    Args:
        credits: Steps in flight at most.
        timeout: Seconds that any one wait may last.
        wire: Put every hand-over through the wire format (for tests).
    """
    model.plugins.register_default(FamilyExecutors(model.plugins))
    pipeline = ThreadPipeline(
        model.specs,
        lambda spec: build_executor(model.plugins, spec),
        credits=credits,
        timeout=timeout,
        wrap=_wired if wire else lambda link: link,
    )
    try:
        pipeline.start(on_progress)
        for spec, done in zip(model.specs, pipeline.loaded, strict=True):
            layers = (spec.start, spec.stop)
            model.plugins.observe(StageLoaded(done.stage, layers, done.bytes, done.seconds))
        yield pipeline
    finally:
        for status in pipeline.stop():
            model.plugins.observe(
                StageStopped(status.stage, status.busy_seconds, status.span_seconds)
            )


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


def build_executor(plugins: Plugins, spec: StageSpec) -> StageExecutor:
    """The executor of ``spec``: a plugin's, or the family's own."""
    executor: StageExecutor = plugins.hook.mlxcel_build_executor(spec=spec)
    return executor


def _wired(link: Link) -> Link:
    from mlxcel.stage.arrays import from_wire, to_wire

    return WireLink(link, lambda value: _bytes(value, to_wire), from_wire)


def _bytes(value: Any, to_wire: Callable[[Any], WireTensor]) -> WireTensor:
    """The engine's own token tensors are bytes already."""
    return value if isinstance(value, WireTensor) else to_wire(value)


def _device() -> Literal["cpu", "gpu"]:
    import mlx.core as mx

    return "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
