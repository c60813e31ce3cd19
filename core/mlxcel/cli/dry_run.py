"""``mlxcel serve --pp-auto N --dry-run``: say what would start, and write the TOML."""

from __future__ import annotations

import argparse
import sys

from mlxcel.cluster.addresses import Address, parse_host
from mlxcel.cluster.dry_run import dry_run
from mlxcel.cluster.options import ClusterOptions
from mlxcel.errors import UsageError


def run_dry(args: argparse.Namespace, options: ClusterOptions) -> int:
    """Print the cluster; returns 0, or raises what would keep it from starting."""
    [model] = options.models
    if not model.is_dir():
        raise UsageError(f"-m {model}: there is no such folder.", "Name the checkpoint's folder.")
    result = dry_run(options, Address(parse_host(args.host, "--host"), args.port), _say)
    for notice in result.notices:
        _say(notice)
    print(result)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
