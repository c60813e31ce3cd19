"""The flags that the benches of what moves bytes have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence

from mlxcel.cli.model_flags import Bound
from mlxcel.cli.size import parse_size
from mlxcel.errors import UsageError
from mlxcel.plugins import Plugins

LARGEST = 1 << 30
MOST_SPIN = 1e6


def add_end_flags(parser: argparse.ArgumentParser, sizes: str, spin: str) -> None:
    """``--sizes``, ``--spin`` and ``--json``; ``sizes`` and ``spin`` are their help."""
    parser.add_argument("--sizes", metavar="A,B", help=sizes)
    parser.add_argument("--spin", type=float, metavar="US", help=spin)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def sizes_of(args: argparse.Namespace, default: Iterable[int]) -> tuple[int, ...]:
    """The bytes of each size that is asked for.

    Raises:
        UsageError: A text is no size.
    """
    if args.sizes is None:
        return tuple(default)
    return tuple(parse_size(text, "--sizes") for text in args.sizes.split(","))


def end_bounds(args: argparse.Namespace, sizes: Sequence[int]) -> Iterator[Bound]:
    """What ``--spin`` and ``--sizes`` must be."""
    yield ("--spin", args.spin, 0 <= (args.spin or 0) <= MOST_SPIN, f"0 to {MOST_SPIN:g}")
    for size in sizes:
        fits = 4 <= size <= LARGEST and size % 4 == 0
        yield ("--sizes", size, fits, "multiples of 4 to 1GiB")


def spin_of(args: argparse.Namespace, default: float) -> float:
    """The seconds that a receiver polls."""
    return default if args.spin is None else args.spin / 1e6


def transports_of(names: Sequence[str]) -> tuple[str, ...]:
    """The transports ``names``, each once, or all that are installed.

    Raises:
        UsageError: One of them is not installed, or none at all is.
    """
    installed = Plugins.discover().names("transport")
    for name in names:
        if name not in installed:
            raise UsageError(
                f"--transport {name}: there is no such transport.",
                f"Installed: {', '.join(installed) or 'none'}.",
            )
    if not installed:
        raise UsageError("No transport is installed.", "Install one, or mlxcel[all].")
    return tuple(dict.fromkeys(names)) or installed
