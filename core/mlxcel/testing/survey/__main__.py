"""``python -m mlxcel.testing.survey``: what ``mlxcel family survey`` runs."""

from __future__ import annotations

import argparse
import json
import sys

import attrs

from mlxcel.plugins import Plugins


def main(argv: list[str]) -> int:
    """Print the findings, as a table or as JSON; 1 if anything differs or has an unknown name."""
    parser = argparse.ArgumentParser(prog="mlxcel family survey")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    plugins = Plugins.discover()
    if args.one is not None:
        from mlxcel.testing.survey.check import survey

        print(json.dumps(attrs.asdict(survey(args.one, plugins))))
        return 0
    from mlxcel.testing.survey.configs import architectures
    from mlxcel.testing.survey.run import findings
    from mlxcel.testing.survey.table import HEAD, row

    known = architectures()
    if unknown := [name for name in args.names if name not in known]:
        print(f"mlx-lm has no architecture {unknown[0]!r}: {', '.join(known)}", file=sys.stderr)
        return 2
    found = []
    if not args.json:
        print(HEAD)
    for finding in findings(args.names or known, plugins):
        found.append(finding)
        if not args.json:
            print(row(finding), flush=True)
    if args.json:
        print(json.dumps([attrs.asdict(finding) for finding in found], indent=2))
    return int(any(finding.outcome == "differs" for finding in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
