"""``mlxcel bench collectives``: the flags."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.cli.bench_transport import LARGEST, MOST_SPIN
from mlxcel.cli.model_flags import check_bounds
from mlxcel.cli.size import parse_size
from mlxcel.errors import UsageError

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
    parser.add_argument(
        "--sizes", metavar="A,B", help="arrays, such as 64KiB,1MiB (4KiB,64KiB,1MiB,4MiB,16MiB)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes that take part (2)")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each (5)")
    parser.add_argument(
        "--spin",
        type=float,
        metavar="US",
        help="microseconds that a rank polls before it sleeps (as ranks here do)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
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
    from mlxcel.plugins import Plugins
    from mlxcel.transport.spin import spin_for

    sizes: tuple[int, ...] = SIZES
    if args.sizes is not None:
        sizes = tuple(parse_size(text, "--sizes") for text in args.sizes.split(","))
    check_bounds(
        [
            ("--ranks", args.ranks, 2 <= args.ranks <= MOST_RANKS, f"2 to {MOST_RANKS}"),
            ("--pairs", args.pairs, args.pairs >= 1, "1 or more"),
            ("--spin", args.spin, 0 <= (args.spin or 0) <= MOST_SPIN, f"0 to {MOST_SPIN:g}"),
            *(
                ("--sizes", size, 4 <= size <= LARGEST and size % 4 == 0, "multiples of 4 to 1GiB")
                for size in sizes
            ),
        ]
    )
    installed = Plugins.discover().names("transport")
    if not installed:
        raise UsageError("No transport is installed.", "Install one, or mlxcel[all].")
    transport = args.transport or installed[0]
    if transport not in installed:
        raise UsageError(
            f"--transport {transport}: there is no such transport.",
            f"Installed: {', '.join(installed)}.",
        )
    if args.spin is None:
        spin = spin_for(args.ranks, traffic="tp_collective")
    else:
        spin = args.spin / 1e6
    return Settings(transport, sizes, args.ranks, args.pairs, spin)
