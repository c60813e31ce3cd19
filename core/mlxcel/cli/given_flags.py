"""Which flags stood on the command line, whatever their values: some exclude each other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

ACTIONS = ("store", "store_true", "append")


def record_given(parser: argparse.ArgumentParser) -> None:
    """Have ``parser`` record its flags; call it before they are added. See :func:`given`."""
    for name in ACTIONS:
        recording = _recording(parser._registry_get("action", name))
        parser.register("action", name, recording)
        if name == "store":
            parser.register("action", None, recording)


def given(args: argparse.Namespace) -> frozenset[str]:
    """The long names of the flags that were given."""
    flags: frozenset[str] = getattr(args, "given", frozenset())
    return flags


def _recording(action: type[argparse.Action]) -> type[argparse.Action]:
    class Recording(action):  # type: ignore[valid-type,misc]
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: str | Sequence[Any] | None,
            option_string: str | None = None,
        ) -> None:
            super().__call__(parser, namespace, values, option_string)
            namespace.given = given(namespace) | {max(self.option_strings, key=len)}

    return Recording
