"""``mlxcel bench transport``: the flags."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.cli.model_flags import check_bounds
from mlxcel.cli.size import parse_size
from mlxcel.errors import UsageError

if TYPE_CHECKING:
    from mlxcel.bench.transport import Settings

LARGEST = 1 << 30
MOST_SPIN = 1e6


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
    parser.add_argument(
        "--sizes",
        metavar="A,B",
        help="payloads, such as 64KiB,1MiB (1KiB,8KiB,1MiB,16MiB)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each (5)")
    parser.add_argument(
        "--spin",
        type=float,
        metavar="US",
        help="microseconds that a receiver polls before it sleeps (100)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
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
    from mlxcel.plugins import Plugins
    from mlxcel.transport.spin import SPIN_SECONDS

    spin = SPIN_SECONDS if args.spin is None else args.spin / 1e6
    sizes = tuple(SIZES)
    if args.sizes is not None:
        sizes = tuple(parse_size(text, "--sizes") for text in args.sizes.split(","))
    check_bounds(
        [
            ("--repeats", args.repeats, args.repeats >= 1, "1 or more"),
            ("--spin", args.spin, 0 <= spin <= MOST_SPIN / 1e6, f"0 to {MOST_SPIN:g}"),
            *(
                ("--sizes", size, 4 <= size <= LARGEST and size % 4 == 0, "multiples of 4 to 1GiB")
                for size in sizes
            ),
        ]
    )
    installed = Plugins.discover().names("transport")
    for name in args.transport:
        if name not in installed:
            raise UsageError(
                f"--transport {name}: there is no such transport.",
                f"Installed: {', '.join(installed) or 'none'}.",
            )
    if not installed:
        raise UsageError("No transport is installed.", "Install one, or mlxcel[all].")
    return Settings(tuple(dict.fromkeys(args.transport)) or installed, sizes, args.repeats, spin)
