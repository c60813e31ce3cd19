"""The ``mlxcel`` command: parses, hands over to a subcommand, turns errors into exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from mlxcel import __version__
from mlxcel.errors import MlxcelError, PluginError
from mlxcel.plugins import is_strict

SUBCOMMANDS: Mapping[str, str] = {
    "generate": "mlxcel.cli.generate",
    "serve": "mlxcel.cli.serve",
    "plan": "mlxcel.cli.plan",
    "plugins": "mlxcel.cli.plugins",
    "import-gguf": "mlxcel.cli.import_gguf",
    "fetch-demo-model": "mlxcel.cli.fetch_demo_model",
    "bench": "mlxcel.cli.bench",
}
"""Subcommand to a light module with ``add_parser(subparsers)`` and ``run(args) -> int``."""

INTERRUPTED = 130
BROKEN_PIPE = 141


def build_parser() -> argparse.ArgumentParser:
    """The parser of every subcommand. Imports no MLX."""
    parser = argparse.ArgumentParser(
        prog="mlxcel", description="Run a language model across several machines."
    )
    parser.add_argument("--version", action="version", version=f"mlxcel {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in SUBCOMMANDS.values():
        importlib.import_module(module).add_parser(subparsers)
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's) and return the exit code."""
    args = build_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int]
    command = importlib.import_module(SUBCOMMANDS[args.command]).run
    try:
        code = command(args)
        sys.stdout.flush()
    except MlxcelError as error:
        if isinstance(error, PluginError) and error.__cause__ and is_strict():
            traceback.print_exception(error.__cause__)
        print(f"mlxcel: error: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left. Python flushes stdout once more at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def _one_line(error: MlxcelError) -> str:
    """The text of ``error``; what others said within it may have had several lines."""
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())
