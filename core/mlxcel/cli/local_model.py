"""The model that the flags of a command describe, on this machine."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from mlxcel.cli.given_flags import given
from mlxcel.cli.plugins import discover
from mlxcel.cli.tensor_flags import check_rank_flags, tensor_options
from mlxcel.errors import UsageError

if TYPE_CHECKING:
    from mlxcel.engine.model import Model
    from mlxcel.engine.service import RunModel
    from mlxcel.stage.blas import BlasChoice

GRACE = "--cluster-heartbeat-grace"


def open_local_model(args: argparse.Namespace, blas: BlasChoice) -> Model:
    """The model, planned; nothing is loaded yet.

    Raises:
        UsageError: Flags of ranks or workers that mean nothing here.
        MlxcelError: See :func:`mlxcel.engine.local.open_model`.
    """
    from mlxcel.engine.local import open_model

    tensor = tensor_options(args)
    check_rank_flags(args)
    if GRACE in given(args) and args.pp_workers != "process":
        raise UsageError(
            f"{GRACE} has no effect: stages that are threads live as long as this process.",
            "Give --pp-workers process too, or leave it out.",
        )
    return open_model(
        args.model,
        discover(args),
        dtype=args.dtype,
        size=args.pp_size,
        layers=args.pp_layers,
        by=args.pp_balance,
        weights=args.weights,
        fast_blas=blas.fast,
        mirrors=args.allow_mirrored_kv,
        tensor=tensor,
        apart=args.tp_workers == "process" and tensor.size > 1,
    )


def run_local_model(args: argparse.Namespace, model: Model, blas: BlasChoice) -> RunModel:
    """What runs the stages of ``model``."""
    from mlxcel.engine.local import running
    from mlxcel.pipeline.processes import SILENT_SECONDS

    return partial(
        running,
        model,
        timeout=args.pp_timeout,
        workers=args.pp_workers,
        environment=blas.environment,
        wire=args.pp_wire,
        rank_timeout=args.tp_timeout,
        collectives=args.tp_collectives,
        # The flag's own default is that of a cluster.
        grace=args.cluster_heartbeat_grace if GRACE in given(args) else SILENT_SECONDS,
    )
