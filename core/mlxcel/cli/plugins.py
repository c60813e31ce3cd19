"""``mlxcel plugins``: what is installed, and why something cannot be used."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.plugin_entries import BAD_STATES
from mlxcel.plugins import Plugins

if TYPE_CHECKING:
    from mlxcel.plugins import PluginRecord

COLUMNS = ("kind", "name", "distribution", "version", "api", "state", "reason")
MORE_COLUMNS = ("hooks", "location")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plugins",
        help="list the installed plugins",
        description="List the installed plugins. Exits with 1 if one of them is bad.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    parser.add_argument(
        "--all", action="store_true", help="also the hooks each implements and where its code is"
    )
    add_no_plugin(parser)


def add_no_plugin(parser: argparse.ArgumentParser) -> None:
    """Add ``--no-plugin NAME``; ``args.no_plugin`` is a list, for ``Plugins.discover``."""
    parser.add_argument(
        "--no-plugin",
        metavar="NAME",
        action="append",
        default=[],
        help="leave out the plugin of this name, or kind:name (repeatable)",
    )


def discover(args: argparse.Namespace) -> Plugins:
    """The plugins that ``args`` and the environment ask for; their notices go to stderr."""
    plugins = Plugins.discover(without=args.no_plugin)
    for notice in plugins.notices:
        print(f"mlxcel: warning: {notice}", file=sys.stderr)
    return plugins


def run(args: argparse.Namespace) -> int:
    records = discover(args).records()
    if args.json:
        print(json.dumps([_as_json(record, args.all) for record in records], indent=2))
    elif records:
        print(table(records, COLUMNS + MORE_COLUMNS if args.all else COLUMNS))
    else:
        print('No plugins are installed. `pip install "mlxcel[all]"` brings the first-party ones.')
    return int(any(record.state in BAD_STATES for record in records))


def table(records: Sequence[PluginRecord], columns: Sequence[str]) -> str:
    """``records`` as lines of left-aligned columns under a header."""
    rows = [tuple(columns)]
    for record in records:
        values = attrs.asdict(record) | {"hooks": ", ".join(record.hooks)}
        rows.append(tuple(str(values[column]) or "-" for column in columns))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _as_json(record: PluginRecord, more: bool) -> dict[str, Any]:
    fields = attrs.asdict(record)
    return fields if more else {k: v for k, v in fields.items() if k not in MORE_COLUMNS}
