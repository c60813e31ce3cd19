"""``mlxcel plan``: which layers each stage would get and what they take, with nothing loaded."""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlxcel.cli.given_flags import record_given
from mlxcel.cli.model_flags import add_stage_flags, add_type_flags
from mlxcel.cli.plugins import add_no_plugin, discover
from mlxcel.cli.size import parse_size
from mlxcel.cli.tensor_flags import add_tensor_flags, check_effect, tensor_options
from mlxcel.errors import UsageError
from mlxcel.partition.cache_bytes import Workload
from mlxcel.partition.memory import MemoryLimits
from mlxcel.partition.report import PartitionQualityReport

if TYPE_CHECKING:
    from mlxcel.checkpoint.checkpoint import Checkpoint
    from mlxcel.checkpoint.dtype import DtypeChoice
    from mlxcel.checkpoint.weights_mode import WeightsChoice
    from mlxcel.family.contract import Family
    from mlxcel.partition.plan import Plan

MOST_TOKENS = 1 << 30


def add_parser(subparsers: Any) -> None:
    """The flags of ``mlxcel plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="show which layers each stage would get, and their memory",
        description="Divide a model into stages, and these over ranks, without loading it. Exits "
        "with 1 if the stages do not fit their memory.",
    )
    record_given(parser)
    parser.add_argument(
        "-m", "--model", required=True, type=Path, metavar="DIR", help="a folder, or a config.json"
    )
    add_stage_flags(parser)
    add_tensor_flags(parser)
    add_type_flags(parser)
    parser.add_argument(
        "--memory",
        metavar="SIZES",
        help="memory of all stages or of each (of one rank), such as 16GB or 8GB,16GiB; auto: what "
        "is free here, shared by all (unlimited)",
    )
    parser.add_argument(
        "--reserve", default="0", metavar="SIZE", help="memory of each stage to leave free (0)"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of a sequence to leave room for"
    )
    parser.add_argument("--sequences", type=int, metavar="N", help="sequences at once (1)")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_no_plugin(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0, or raises what went wrong."""
    from mlxcel.checkpoint.config import read_config
    from mlxcel.family.choose import choose_family
    from mlxcel.partition.consistency import oddities
    from mlxcel.partition.plan import make_plan

    tensor = tensor_options(args)
    check_effect(args, tensor.size)
    limits, workload = _limits(args), _workload(args)
    plugins = discover(args)
    _, family = choose_family(read_config(args.model), plugins)
    checkpoint = _checkpoint(args.model, family)
    weights, dtype = _types(args, checkpoint, family)
    plan = make_plan(
        checkpoint,
        family,
        dtype,
        plugins,
        dequantize=weights.dequantize,
        size=args.pp_size,
        layers=args.pp_layers,
        by=args.pp_balance,
        workload=workload,
        limits=limits,
        mirrors=args.allow_mirrored_kv,
        tensor=tensor,
        apart=True,
    )
    report = PartitionQualityReport(plan.stages, plan.profile.groups)
    warnings = [*checkpoint.notices, *oddities(checkpoint, family)]
    if warning := report.warning():
        warnings.append(warning)
    about = [_origin(checkpoint), dtype.notice, *filter(None, [weights.notice])]
    if tensor.size > 1:
        about.insert(0, f"ranks: {tensor.size} share each stage; memory is that of one")
    if args.json:
        print("\n".join(about), file=sys.stderr)
        print(json.dumps(_as_json(plan, report, warnings), indent=2))
    else:
        from mlxcel.cli.plan_table import print_table
        from mlxcel.cli.plan_tensors import print_tensors

        print_table(plan.stages, None if limits is None else limits.budgets(len(plan.stages)))
        if plan.ranks is not None:
            print()
            print_tensors(plan.ranks)
            print()
        print("\n".join([*about, *report.lines(), *warnings]))
    return 0


def _checkpoint(path: Path, family: Family) -> Checkpoint:
    """The checkpoint at ``path`` if there are weights, else what its config.json describes."""
    from mlxcel.partition.from_config import checkpoint_from_config, has_weights

    return family.open(path) if has_weights(path) else checkpoint_from_config(path, family)


def _types(
    args: argparse.Namespace, checkpoint: Checkpoint, family: Family
) -> tuple[WeightsChoice, DtypeChoice]:
    """What ``--weights`` and ``--dtype`` come to on machines like this one."""
    from mlxcel.checkpoint.dtype import choose_dtype
    from mlxcel.checkpoint.weights_mode import choose_weights
    from mlxcel.partition.profile import plain_bytes

    device: Literal["cpu", "gpu"] = "gpu" if platform.system() == "Darwin" else "cpu"
    weights = choose_weights(
        checkpoint,
        args.weights,
        dtype=args.dtype,
        device=device,
        fast_blas=False,  # the plan may be for other machines
        plain_bytes=plain_bytes(checkpoint, family),
        memory_bytes=None,
    )
    dtype = "float32" if weights.dequantize else args.dtype
    return weights, choose_dtype(checkpoint, dtype, device)


def _limits(args: argparse.Namespace) -> MemoryLimits | None:
    """The memory of the stages as ``--memory`` and ``--reserve`` declare it."""
    if args.pp_size is not None and args.pp_size < 1:
        raise UsageError(f"--pp-size {args.pp_size} is out of range.", "Give 1 or more.")
    reserve = parse_size(args.reserve, "--reserve")
    if args.memory == "auto":
        return MemoryLimits((_share_of_this_machine(args),), reserve)
    if args.memory is not None:
        sizes = tuple(parse_size(text, "--memory") for text in args.memory.split(","))
        return MemoryLimits(sizes, reserve)
    if reserve:
        raise UsageError("--reserve needs --memory.", "Give the memory of the stages too.")
    return None


def _share_of_this_machine(args: argparse.Namespace) -> int:
    """What each rank of a stage gets if all of them share the memory that is free here now."""
    from mlxcel.checkpoint.weights_mode import available_memory

    free = available_memory()
    if free is None:
        raise UsageError(
            "--memory auto: this system does not say how much memory is free.",
            "Give sizes such as 16GB.",
        )
    ranges = args.pp_layers.count(",") + 1 if args.pp_layers is not None else 1
    workers: int = (args.pp_size or ranges) * args.tp_size
    return free // workers


def _workload(args: argparse.Namespace) -> Workload | None:
    """The sequences to leave room for."""
    for flag, value in (("--context", args.context), ("--sequences", args.sequences)):
        if value is not None and not 1 <= value <= MOST_TOKENS:
            raise UsageError(f"{flag} {value} is out of range.", f"Give 1 to {MOST_TOKENS}.")
    if args.context is not None:
        return Workload(args.context, args.sequences or 1)
    if args.sequences is not None:
        raise UsageError("--sequences needs --context.", "Give the tokens of a sequence too.")
    return None


def _origin(checkpoint: Checkpoint) -> str:
    if checkpoint.files:
        return f"bytes: exact, from the headers of {len(checkpoint.files)} weight file(s)"
    return f"bytes: estimated from {checkpoint.config.path}, without weights"


def _as_json(plan: Plan, report: PartitionQualityReport, warnings: Sequence[str]) -> dict[str, Any]:
    from mlxcel.cli.plan_tensors import tensors_as_json

    return {
        "stages": [
            {
                "stage_index": stage.stage_index,
                "device_id": stage.device_id,
                "layer_range": [stage.layer_range.start, stage.layer_range.stop],
                "has_embedding": stage.has_embedding,
                "has_lm_head": stage.has_lm_head,
                "estimated_memory_bytes": stage.estimated_memory_bytes,
                "kv_bytes": stage.kv_bytes,
            }
            for stage in plan.stages
        ],
        "tensor_parallel_size": 1 if plan.ranks is None else plan.ranks.size,
        "tensors": [] if plan.ranks is None else tensors_as_json(plan.ranks),
        "imbalance": report.imbalance if math.isfinite(report.imbalance) else None,
        "warnings": list(warnings),
        "adjacency": [
            {"start": group.start, "end": group.end, "reason": group.reason}
            for group in plan.profile.groups
        ],
    }
