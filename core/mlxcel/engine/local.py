"""A model on this machine: opened, planned, and run as a pipeline of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import attrs

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.config import read_config
from mlxcel.checkpoint.dtype import DtypeChoice, choose_dtype
from mlxcel.checkpoint.weights_mode import WeightsChoice, available_memory, choose_weights
from mlxcel.engine.tokenizer import Tokenizer, load_tokenizer
from mlxcel.errors import CheckpointError, MlxcelError, UnsupportedError
from mlxcel.family.choose import choose_family
from mlxcel.observe.events import StageLoaded, StageStopped
from mlxcel.partition.balance import BalanceBy
from mlxcel.partition.consistency import oddities
from mlxcel.partition.plan import Plan, make_plan
from mlxcel.partition.profile import plain_bytes
from mlxcel.pipeline.link import Link, WireLink
from mlxcel.pipeline.pipeline import OnProgress
from mlxcel.pipeline.processes import ProcessPipeline
from mlxcel.pipeline.threads import ThreadPipeline
from mlxcel.pipeline.workers import WorkerPipeline
from mlxcel.plugins import Plugins
from mlxcel.stage.build import FamilyExecutors, build_executor
from mlxcel.stage.contract import StageSpec
from mlxcel.wire.tensor import WireTensor

Workers = Literal["thread", "process"]


@attrs.frozen
class LocalModel:
    """A checkpoint with its family, dtype and plan; nothing is loaded yet."""

    checkpoint: Checkpoint
    family: str
    dtype: DtypeChoice
    weights: WeightsChoice
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
                self.weights.dequantize,
            )
            for stage in stages
        )

    @property
    def notices(self) -> tuple[str, ...]:
        """One line each for what the user should know before anything loads."""
        found = (*self.checkpoint.notices, *oddities(self.checkpoint))
        own = (self.dtype.notice, self.weights.notice)
        return (*found, *(notice for notice in own if notice is not None))

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse token ids that the model's embedding has no row for.

        Raises:
            CheckpointError: The tokenizer is not this model's.
        """
        rows = self.checkpoint.config.get("vocab_size")
        if isinstance(rows, int) and (highest := max(tokens, default=0)) >= rows:
            raise CheckpointError(
                self.checkpoint.path / "tokenizer.json",
                f"makes the token id {highest}, but the model knows {rows} tokens.",
                "Use the tokenizer that belongs to the weights.",
            )


def open_model(
    path: Path,
    plugins: Plugins,
    *,
    dtype: str = "auto",
    size: int | None = None,
    layers: str | None = None,
    by: BalanceBy = "bytes",
    weights: str = "auto",
    fast_blas: bool = False,
) -> LocalModel:
    """Read headers, choose family, dtype and stages; refuse what cannot run.

    Args:
        dtype, size, layers, by, weights: As the flags of ``mlxcel generate``.
        fast_blas: Whether the stages will multiply with a fast BLAS.

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
    mode = choose_weights(
        checkpoint,
        weights,
        dtype=dtype,
        device=_device(),
        fast_blas=fast_blas,
        plain_bytes=plain_bytes(checkpoint, family),
        memory_bytes=available_memory(),
    )
    choice = choose_dtype(checkpoint, "float32" if mode.dequantize else dtype, _device())
    plan = make_plan(
        checkpoint,
        family,
        choice,
        plugins,
        dequantize=mode.dequantize,
        size=size,
        layers=layers,
        by=by,
    )
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    return LocalModel(checkpoint, name, choice, mode, plan, tokenizer, plugins)


@contextmanager
def running(
    model: LocalModel,
    *,
    credits: int,
    timeout: float,
    workers: Workers = "thread",
    environment: Mapping[str, str] | None = None,
    wire: bool = False,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Iterator[WorkerPipeline]:
    """The model's pipeline, loaded; whatever happens inside, nothing is left running.

    Args:
        credits: Steps in flight at most.
        timeout: Seconds that any one wait may last.
        workers: Whether stages are threads or processes.
        environment: What worker processes have in their environment beyond this one's.
        wire: Put every hand-over between threads through the wire format (for tests);
            processes have no other way.
    """
    pipeline: WorkerPipeline
    if workers == "process":
        pipeline = ProcessPipeline(
            model.specs,
            credits=credits,
            timeout=timeout,
            environment=environment,
            without=model.plugins.without,
        )
    else:
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
    except BaseException:
        with suppress(MlxcelError):  # what went wrong first is what is told
            pipeline.stop(drain=False)
        raise
    for status in pipeline.stop():
        model.plugins.observe(StageStopped(status.stage, status.busy_seconds, status.span_seconds))


def _wired(link: Link) -> Link:
    from mlxcel.stage.arrays import from_wire, to_wire

    return WireLink(link, lambda value: _bytes(value, to_wire), from_wire)


def _bytes(value: Any, to_wire: Callable[[Any], WireTensor]) -> WireTensor:
    """The engine's own token tensors are bytes already."""
    return value if isinstance(value, WireTensor) else to_wire(value)


def _device() -> Literal["cpu", "gpu"]:
    import mlx.core as mx

    return "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
