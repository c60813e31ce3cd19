"""Which flags were given."""

from __future__ import annotations

import argparse

from mlxcel.cli.given_flags import given, record_given


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    record_given(made)
    made.add_argument("-p", "--port", type=int, default=8080)
    group = made.add_argument_group("more")
    group.add_argument("--verbose", action="store_true")
    group.add_argument("--key", action="append", default=[])
    return made


def test_a_flag_counts_whatever_its_value() -> None:
    """The default value, given, is given; the long name stands for the short one."""
    args = parser().parse_args(["-p", "8080", "--verbose", "--key", "a", "--key", "b"])
    assert given(args) == {"--port", "--verbose", "--key"}
    assert (args.port, args.verbose, args.key) == (8080, True, ["a", "b"])


def test_what_is_left_out_is_not_given() -> None:
    """Defaults alone are nothing."""
    args = parser().parse_args([])
    assert given(args) == frozenset()
    assert (args.port, args.verbose, args.key) == (8080, False, [])


def test_parsers_do_not_share_what_was_given() -> None:
    """Each command line is for itself."""
    parser().parse_args(["--verbose"])
    assert given(parser().parse_args([])) == frozenset()
