"""``mlxcel bench transport``: the flags."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.cli.bench_ends import add_end_flags, end_bounds, sizes_of, spin_of, transports_of
from mlxcel.cli.model_flags import check_bounds

if TYPE_CHECKING:
    from mlxcel.bench.transport import Settings


def add_parser(kinds: Any) -> None:
    """The flags of ``mlxcel bench transport``."""
    parser = kinds.add_parser(
        "transport", help="round trips of arrays, against raw sockets and MLX's own ring"
    )
    parser.add_argument(
        "--transport",
        action="append",
        default=[],
        metavar="NAME",
        help="which to measure; may be repeated (all that are installed)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each (5)")
    add_end_flags(
        parser,
        "payloads, such as 64KiB,1MiB (1KiB,8KiB,1MiB,16MiB)",
        "microseconds that a receiver polls before it sleeps (300)",
    )
    parser.set_defaults(run_kind=run)


def run(args: argparse.Namespace) -> int:
    """Measure, and print two tables."""
    from mlxcel.bench import transport

    report = transport.run(_settings(args))
    if args.json:
        print(json.dumps(attrs.asdict(report)))
    else:
        print(transport.markdown(report))
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    from mlxcel.bench.transport import SIZES, Settings
    from mlxcel.transport.spin import SPIN_SECONDS

    sizes = sizes_of(args, SIZES)
    check_bounds(
        [
            ("--repeats", args.repeats, args.repeats >= 1, "1 or more"),
            *end_bounds(args, sizes),
        ]
    )
    spin = spin_of(args, SPIN_SECONDS)
    return Settings(transports_of(args.transport), sizes, args.repeats, spin)
