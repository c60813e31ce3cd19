"""``mlxcel cluster``: the secret that all nodes share, and the file that lists them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mlxcel.cli.plugins import add_no_plugin, discover
from mlxcel.cluster.secret import create_secret
from mlxcel.cluster.topology_checks import check_transport
from mlxcel.cluster.topology_toml import read_topology


def add_parser(subparsers: Any) -> None:
    """The flags of ``mlxcel cluster …``."""
    cluster = subparsers.add_parser("cluster", help="make a cluster's secret, check its TOML file")
    kinds = cluster.add_subparsers(dest="kind", metavar="KIND", required=True)
    secret = kinds.add_parser(
        "secret", help="write a new secret", description="Write a new secret to a new file."
    )
    secret.add_argument("path", metavar="PATH", type=Path, help="the file; only you can read it")
    check = kinds.add_parser(
        "check", help="check a TOML file", description="Check a TOML file and print its nodes."
    )
    check.add_argument("file", metavar="FILE", type=Path)
    add_no_plugin(check)
    cluster.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command of the kind asked for; returns 0, or raises what went wrong."""
    return run_secret(args) if args.kind == "secret" else run_check(args)


def run_secret(args: argparse.Namespace) -> int:
    """Write a secret, and say where; the secret itself is never printed."""
    create_secret(args.path)
    print(f"{args.path}: a new secret, copy it to all nodes")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Read a TOML file as a node would."""
    topology = read_topology(args.file)
    transports = discover(args).names("transport")
    check_transport(topology.transport_backend, transports, f"{args.file}: transport_backend")
    print(topology.describe())
    return 0
