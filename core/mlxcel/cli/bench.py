"""``mlxcel bench``: measure speed as ratios to a reference run in turn."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from mlxcel.cli import bench_collectives, bench_serve, bench_tensor, bench_transport
from mlxcel.errors import UsageError


def add_parser(subparsers: Any) -> None:
    """The flags of ``mlxcel bench …``."""
    bench = subparsers.add_parser(
        "bench", help="measure speed against a reference; let nothing else run beside it"
    )
    kinds = bench.add_subparsers(dest="kind", metavar="KIND", required=True)
    pipeline = kinds.add_parser("pipeline", help="stages against mlx-lm on the same prompts")
    pipeline.add_argument("-m", "--model", required=True, type=Path, metavar="DIR")
    pipeline.add_argument("--pairs", type=int, default=5, help="interleaved pairs a case (5)")
    pipeline.add_argument("--tokens", type=int, default=16, help="tokens decoded a request (16)")
    pipeline.add_argument("--prompt", type=int, default=192, help="tokens of a long prompt (192)")
    pipeline.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="cases whose name has TEXT"
    )
    pipeline.add_argument("--json", action="store_true", help="one JSON object a line")
    pipeline.set_defaults(run_kind=run_pipeline)
    engine = kinds.add_parser("engine", help="what scheduling costs a step")
    engine.add_argument("-m", "--model", type=Path, metavar="DIR", help="for its tokenizer")
    engine.add_argument("--repeats", type=int, default=5, help="runs of each figure (5)")
    engine.add_argument("--json", action="store_true", help="one JSON object a line")
    engine.set_defaults(run_kind=run_engine)
    bench_serve.add_parser(kinds)
    bench_transport.add_parser(kinds)
    bench_tensor.add_parser(kinds)
    bench_collectives.add_parser(kinds)
    bench.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the bench of the kind asked for."""
    command: Callable[[argparse.Namespace], int] = args.run_kind
    return command(args)


def _at_least_one(args: argparse.Namespace, *flags: str) -> None:
    for flag in flags:
        if (value := getattr(args, flag)) < 1:
            raise UsageError(f"--{flag} {value} is too few.", "Give 1 or more.")


def run_engine(args: argparse.Namespace) -> int:
    """Measure the engine alone."""
    from mlxcel.bench import engine

    _at_least_one(args, "repeats")
    rows = engine.run(args.model, args.repeats)
    for row in rows if args.json else ():
        print(json.dumps(attrs.asdict(row)))
    if not args.json:
        print(engine.markdown(rows))
    return 0


def run_pipeline(args: argparse.Namespace) -> int:
    """Compare pipelines; a row is reported as soon as it is measured."""
    from mlxcel.bench import pipeline

    _at_least_one(args, "pairs", "prompt")
    if args.tokens < 4:
        raise UsageError(f"--tokens {args.tokens} is too few.", "Give 4 or more.")
    settings = pipeline.Settings(args.pairs, args.tokens, args.prompt)
    chosen = [
        case
        for case in pipeline.cases(args.model, settings)
        if not args.only or any(text in case.name for text in args.only)
    ]
    if not chosen:
        raise UsageError("--only matches no case.", "Leave it out to see all names.")
    rows = []
    for row in pipeline.run(chosen, settings):
        rows.append(row)
        print(f"{row.name}: {row.comparison.ratio.median:.2f}", file=sys.stderr)
        if args.json:
            print(json.dumps(attrs.asdict(row)), flush=True)
    if not args.json:
        print(pipeline.markdown(rows))
    return 0
