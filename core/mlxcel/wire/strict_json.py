"""JSON from a peer, taken exactly as it should be or not at all: ``"3"`` is no number.

Half a surrogate pair, which UTF-8 cannot hold, is refused. Python itself has such texts, for file
names that are no UTF-8; they leave with a backslash instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, get_args

import cattrs
from cattrs.errors import CattrsError
from cattrs.preconf.json import make_converter

from mlxcel.errors import WireError

_CONTROLS = {n: f"\\x{n:02x}" for n in (*range(0x20), *range(0x7F, 0xA0)) if chr(n) not in "\t\n"}


def strict_converter(*, escaping: bool = False) -> cattrs.Converter:
    """A converter that accepts only known fields, each with exactly its type.

    Args:
        escaping: For texts that are shown to people: control characters, which act on a terminal,
            are read as ``\\x1b`` and the like.
    """
    converter = make_converter(forbid_extra_keys=True, detailed_validation=False)
    converter.register_structure_hook(bool, _exactly(bool))
    converter.register_structure_hook(str, _shown if escaping else _text)
    converter.register_unstructure_hook(str, _storable)
    converter.register_structure_hook(int, _integer)
    converter.register_structure_hook(float, _finite)
    converter.register_structure_hook_factory(
        lambda cls: getattr(cls, "__origin__", None) is tuple,
        lambda cls: _items(get_args(cls), converter),
    )
    return converter


def structure(converter: cattrs.Converter, text: memoryview, cls: Any, what: str) -> Any:
    """The object of class ``cls`` that the JSON ``text`` describes.

    Raises:
        WireError: It describes none; ``what`` names it in the error.
    """
    try:
        return converter.structure(json.loads(str(text, "utf-8")), cls)
    # cattrs lets a hook's own error through, whatever it is; this is all that JSON's
    # values can provoke in the hooks below and in the generated ones.
    except (
        CattrsError,
        AttributeError,
        LookupError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise WireError(f"{what}: {type(error).__name__}: {error!s:.200}") from error


def _exactly(cls: type) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not cls:
            raise TypeError(f"{type(value).__name__} instead of {cls.__name__}")
        return value

    return structure


def shown(text: str) -> str:
    """``text`` with escapes for its control characters, but tabs and ends of lines."""
    return text if text.isprintable() else text.translate(_CONTROLS)


def _text(value: Any, _: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} instead of str")
    value.encode()  # as whoever takes it will
    return value


def _shown(value: Any, cls: Any) -> str:
    return shown(_text(value, cls))


def _storable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _integer(value: Any, _: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} instead of int")
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError("an integer of more than 64 bits")
    return value


def _finite(value: Any, _: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{type(value).__name__} instead of float")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{number} instead of a finite number")
    return number


def _items(types: tuple[Any, ...], converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Of ``tuple[X, ...]`` any number of items, of ``tuple[X, Y]`` exactly these."""
    any_number = types[-1] is Ellipsis
    items = types[:1] if any_number else types
    hooks = [converter.get_structure_hook(item) for item in items]

    def structure(value: Any, _: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise TypeError(f"{type(value).__name__} instead of list")
        if any_number:
            return tuple(hooks[0](element, items[0]) for element in value)
        return tuple(
            hook(element, item) for hook, item, element in zip(hooks, items, value, strict=True)
        )

    return structure
