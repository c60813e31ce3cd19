"""Reading one table of a TOML file strictly: every key is known and has its type."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from mlxcel.errors import TopologyError

T = TypeVar("T")
D = TypeVar("D")

_KINDS = {
    str: "a string in quotes",
    int: "an integer",
    dict: "a table",
    list: "an array of tables, each under its own [[…]]",
}


@attrs.frozen
class Table:
    """A table called ``title`` of the file ``source``, which may have the keys ``known``.

    Raises:
        TopologyError: It has another key; the text names the nearest known one.
    """

    values: Mapping[str, Any]
    title: str
    source: str
    known: tuple[str, ...]

    def __attrs_post_init__(self) -> None:
        for key in self.values:
            if key not in self.known:
                [nearest] = difflib.get_close_matches(key, self.known, n=1, cutoff=0.0)
                raise TopologyError(
                    f"{self.title} has the unknown key {key!r}.",
                    f"The nearest known one is {nearest!r}; all are {', '.join(self.known)}.",
                    self.source,
                )

    def place(self, key: str) -> str:
        """How errors call the value of ``key``."""
        return f"{self.source}: {self.title} {key}"

    def need(self, key: str, kind: type[T]) -> T:
        """The value of ``key``, which must be there.

        Raises:
            TopologyError: It is not, or is not of this type.
        """
        value = self.get(key, kind, None)
        if value is None:
            raise TopologyError(f"{self.title} has no {key!r}.", "Add it.", self.source)
        return value

    def get(self, key: str, kind: type[T], default: D) -> T | D:
        """The value of ``key``, or ``default`` where it is not there.

        Raises:
            TopologyError: It is not of this type, or an integer of more than 64 bits.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:  # as TOML has it
            raise TopologyError(
                f"{self.title}: {key!r} is an integer of more than 64 bits.",
                f"It must be {_KINDS[kind]}.",
                self.source,
            )
        if type(value) is not kind:  # True is no integer here
            raise TopologyError(
                f"{self.title}: {key!r} is {_short(value)}.",
                f"It must be {_KINDS[kind]}.",
                self.source,
            )
        return value


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # it holds an integer of thousands of digits
        return "too large"
    return text if len(text) <= 40 else f"{text[:37]}..."
