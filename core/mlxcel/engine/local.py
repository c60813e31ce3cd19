"""A model whose stages are threads or processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from mlxcel.checkpoint.weights_mode import RESERVE_BYTES, available_memory
from mlxcel.engine.model import Machine, Model, plan_model
from mlxcel.engine.started import started
from mlxcel.partition.balance import BalanceBy
from mlxcel.pipeline.link import Link, WireLink
from mlxcel.pipeline.pipeline import OnProgress
from mlxcel.pipeline.processes import SILENT_SECONDS, ProcessPipeline
from mlxcel.pipeline.threads import ThreadPipeline
from mlxcel.pipeline.workers import WorkerPipeline
from mlxcel.plugins import Plugins
from mlxcel.stage.build import FamilyExecutors, build_executor
from mlxcel.tensor.options import ALONE, TensorParallel
from mlxcel.wire.tensor import WireTensor

Workers = Literal["thread", "process"]


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
    mirrors: bool = False,
    tensor: TensorParallel = ALONE,
    apart: bool = False,
) -> Model:
    """The model at ``path``, planned for stages on this machine.

    Args:
        fast_blas: Whether the stages will multiply with a fast BLAS.
        dtype, size, layers, by, weights, mirrors, tensor, apart: See
            :func:`mlxcel.engine.model.plan_model`, also for what it raises.
    """
    machine = Machine(_device(), fast_blas, available_memory())
    return plan_model(
        path,
        plugins,
        machine,
        dtype=dtype,
        size=size,
        layers=layers,
        by=by,
        weights=weights,
        mirrors=mirrors,
        tensor=tensor,
        apart=apart,
    )


@contextmanager
def running(
    model: Model,
    *,
    credits: int,
    timeout: float,
    workers: Workers = "thread",
    environment: Mapping[str, str] | None = None,
    wire: bool = False,
    rank_timeout: float = 30.0,
    collectives: str = "transport",
    grace: float = SILENT_SECONDS,
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
        rank_timeout: Seconds that a rank which is a process may wait for the others of its stage.
        collectives: How such ranks reach each other, as ``--tp-collectives`` says.
        grace: Seconds without a sign of life after which a worker process is taken for stopped.

    Raises:
        UsageError: MLX has no such backend here.
    """
    pipeline: WorkerPipeline
    if workers == "process":
        if collectives != "transport":
            _check_backend(collectives)
        pipeline = ProcessPipeline(
            model.worker_specs,
            credits=credits,
            timeout=timeout,
            environment=environment,
            without=model.plugins.without,
            rank_timeout=rank_timeout,
            collectives=collectives,
            grace=grace,
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
    with started(pipeline, model, on_progress):
        yield pipeline


def kv_budgets(model: Model, given: int | None = None) -> list[int | None]:
    """The cache bytes of each worker, in the order of ``model.worker_specs``.

    Without a ``given`` budget, the workers share what is free now, less their weights and a
    reserve; where free memory is not known, they are unlimited.
    """
    workers = model.worker_specs
    if given is None and (memory := available_memory()) is not None:
        stages = model.plan.stages
        weights = sum(stages[spec.index].estimated_memory_bytes for spec in workers)
        given = max(0, memory - weights - RESERVE_BYTES) // len(workers)
    return [given] * len(workers)


def _check_backend(collectives: str) -> None:
    """Before anything starts; each worker would find out by itself."""
    from mlxcel.tensor.distributed import check_backend

    check_backend(collectives)


def _wired(link: Link) -> Link:
    from mlxcel.stage.arrays import from_wire, to_wire

    return WireLink(link, lambda value: _bytes(value, to_wire), from_wire)


def _bytes(value: Any, to_wire: Callable[[Any], WireTensor]) -> WireTensor:
    """The engine's own token tensors are bytes already."""
    return value if isinstance(value, WireTensor) else to_wire(value)


def _device() -> Literal["cpu", "gpu"]:
    import mlx.core as mx

    return "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
