"""``mlxcel bench collectives``: the flags."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.cli.bench_ends import add_end_flags, end_bounds, sizes_of, spin_of, transports_of
from mlxcel.cli.model_flags import check_bounds

if TYPE_CHECKING:
    from mlxcel.bench.collectives import Settings

MOST_RANKS = 16


def add_parser(kinds: Any) -> None:
    """The flags of ``mlxcel bench collectives``."""
    parser = kinds.add_parser(
        "collectives", help="sums over the ranks of a stage, against MLX's own ring"
    )
    parser.add_argument(
        "--transport", metavar="NAME", help="which to measure (the first that is installed)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes that take part (2)")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each (5)")
    add_end_flags(
        parser,
        "arrays, such as 64KiB,1MiB (4KiB,64KiB,1MiB,4MiB,16MiB)",
        "microseconds that a rank polls before it sleeps (as ranks here do)",
    )
    parser.set_defaults(run_kind=run)


def run(args: argparse.Namespace) -> int:
    """Measure, and print two tables."""
    from mlxcel.bench import collectives

    report = collectives.run(_settings(args))
    if args.json:
        print(json.dumps(attrs.asdict(report)))
    else:
        print(collectives.markdown(report))
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    from mlxcel.bench.collectives import SIZES, Settings
    from mlxcel.transport.spin import spin_for

    sizes = sizes_of(args, SIZES)
    check_bounds(
        [
            ("--ranks", args.ranks, 2 <= args.ranks <= MOST_RANKS, f"2 to {MOST_RANKS}"),
            ("--pairs", args.pairs, args.pairs >= 1, "1 or more"),
            *end_bounds(args, sizes),
        ]
    )
    transport, *_ = transports_of([] if args.transport is None else [args.transport])
    spin = spin_of(args, spin_for(args.ranks, traffic="tp_collective"))
    return Settings(transport, sizes, args.ranks, args.pairs, spin)
