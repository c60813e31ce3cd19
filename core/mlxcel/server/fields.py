"""Reading the fields of a JSON object that a client sent, each checked as it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from mlxcel.server.errors import ApiError, invalid

LONGEST_QUOTE = 80

DEEPEST = 128
"""Levels of objects and lists inside each other: what reads them further may call itself."""


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object that ``data`` is.

    Raises:
        ApiError: It is no JSON, or something else than an object, or nested too deep.
    """
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body is not JSON ({error}).", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid(f"The body must be a JSON object, not {quoted(value)}.", code="invalid_json")
    if is_too_deep(value):
        text = f"The body has more than {DEEPEST} levels of objects and lists in each other."
        raise invalid(text, code="invalid_json")
    return value


def is_too_deep(value: dict[str, Any]) -> bool:
    """Whether ``value`` has more than :data:`DEEPEST` levels."""
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    return bool(level)


def quoted(value: object) -> str:
    """``value`` as JSON, short enough for an error text."""
    text = json.dumps(value)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"


class Fields:
    """The fields of an object; null is as good as absent.

    Args:
        values: The object.
        path: What stands before a field's name in errors, such as ``messages[0].``.

    Every method raises :class:`ApiError` for a value that does not fit, naming the field.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def get(self, name: str) -> Any:
        """The value as it is, or None."""
        return self._values.get(name)

    def names(self) -> Iterator[str]:
        """The fields that have a value."""
        return (name for name, value in self._values.items() if value is not None)

    def path(self, name: str) -> str:
        """What errors call the field ``name``."""
        return self._path + name

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def flag(self, name: str) -> bool:
        """False where it is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not low <= value <= high or math.isnan(value):
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def object(self, name: str) -> Fields | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self._path}{name}.")

    def wrong(self, name: str, wanted: str) -> ApiError:
        """The error that says what ``name`` must be."""
        path = self.path(name)
        if self.get(name) is None:
            return invalid(f"'{path}' is missing; it must be {wanted}.", path, "missing_field")
        text = f"'{path}' must be {wanted}, not {quoted(self.get(name))}."
        return invalid(text, path, "invalid_value")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
