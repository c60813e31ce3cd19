"""The ``mlxcel`` command: parses, hands over to a subcommand, turns errors into exit codes."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper

from mlxcel import __version__
from mlxcel.errors import MlxcelError, PluginError
from mlxcel.plugins import is_strict

SUBCOMMANDS: Mapping[str, str] = {
    "generate": "mlxcel.cli.generate",
    "serve": "mlxcel.cli.serve",
    "chat": "mlxcel.cli.chat",
    "plan": "mlxcel.cli.plan",
    "cluster": "mlxcel.cli.cluster",
    "plugins": "mlxcel.cli.plugins",
    "import-gguf": "mlxcel.cli.import_gguf",
    "fetch-demo-model": "mlxcel.cli.fetch_demo_model",
    "family": "mlxcel.cli.family",
    "bench": "mlxcel.cli.bench",
}
"""Subcommand to a light module with ``add_parser(subparsers)`` and ``run(args) -> int``."""

INTERRUPTED = 130
BROKEN_PIPE = 141
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


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
    _settle_streams()
    try:
        args = build_parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int]
        command = importlib.import_module(SUBCOMMANDS[args.command]).run
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
        _discard_output()  # the reader left
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        _discard_output()
        text = f"the output cannot be written ({error.strerror}). Send it elsewhere."
        print(f"mlxcel: error: {text}", file=sys.stderr)
        return 1
    return code


def _settle_streams() -> None:
    """Have all three standard streams, and a stdout that takes any character.

    Where one is closed, its number would go to the next file or socket that is opened.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the free number
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8")
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _discard_output() -> None:
    """Python flushes stdout once more at exit: give it somewhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: MlxcelError) -> str:
    """The text of ``error``; what others said within it may have had several lines."""
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())
