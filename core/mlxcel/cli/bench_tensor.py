"""``mlxcel bench tensor``: the flags."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import attrs

from mlxcel.cli.model_flags import check_bounds
from mlxcel.tensor.options import MOST_RANKS


def add_parser(kinds: Any) -> None:
    """The flags of ``mlxcel bench tensor``."""
    parser = kinds.add_parser("tensor", help="ranks as processes, against one process")
    parser.add_argument("-m", "--model", required=True, type=Path, metavar="DIR")
    parser.add_argument("--tp-size", type=int, default=2, metavar="N", help="ranks (2)")
    parser.add_argument(
        "--tp-collectives",
        default="transport",
        choices=["transport", "ring"],
        help="how ranks reach each other (transport)",
    )
    parser.add_argument("--blas", default="auto", help="auto, wheel, or a library's path (auto)")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs a case (5)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens decoded a run (24)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the long prompt (512)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(run_kind=run)


def run(args: argparse.Namespace) -> int:
    """Compare; a row is reported as soon as it is measured."""
    from mlxcel.bench import pipeline, tensor

    check_bounds(
        [
            ("--tp-size", args.tp_size, 2 <= args.tp_size <= MOST_RANKS, f"2 to {MOST_RANKS}"),
            ("--pairs", args.pairs, args.pairs >= 1, "1 or more"),
            ("--tokens", args.tokens, args.tokens >= 4, "4 or more"),
            ("--prompt", args.prompt, args.prompt >= 2, "2 or more"),
        ]
    )
    settings = tensor.Settings(args.tp_size, args.tp_collectives, args.blas, args.prompt)
    lengths = pipeline.Settings(args.pairs, args.tokens, args.prompt)
    rows = []
    for row in pipeline.run(tensor.cases(args.model, settings), lengths):
        rows.append(row)
        print(f"{row.name}: {row.comparison.ratio.median:.2f}", file=sys.stderr)
        if args.json:
            print(json.dumps(attrs.asdict(row)), flush=True)
    if not args.json:
        print(pipeline.markdown(rows))
    return 0
