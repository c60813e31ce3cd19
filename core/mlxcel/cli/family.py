"""``mlxcel family``: what is to know about families, for those who write or choose one."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    """The flags of ``mlxcel family`` and what it can do."""
    parser = subparsers.add_parser("family", help="try which architectures can be split")
    commands = parser.add_subparsers(dest="family_command", metavar="WHAT", required=True)
    survey = commands.add_parser(
        "survey",
        help="split a tiny model of every architecture that mlx-lm knows",
        description="Make a tiny random model of every text architecture of the installed mlx-lm, "
        "cut it at every layer and compare it with the whole one, bit for bit. Takes some "
        "minutes. Exits with 1 if one differs.",
    )
    survey.add_argument("names", nargs="*", metavar="NAME", help="only these architectures")
    survey.add_argument("--json", action="store_true", help="print a JSON array")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    flags = ["--json"] if args.json else []
    # The tools for tests are no part of what the command line builds on.
    command = [sys.executable, "-m", "mlxcel.testing.survey", *flags, "--", *args.names]
    return subprocess.run(command, check=False).returncode
