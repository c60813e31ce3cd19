"""The fields of config.json that families plan with, read under a check.

Every function raises a :class:`~mlxcel.errors.CheckpointError` that names config.json and the
field, so that a family needs no checks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxcel.errors import CheckpointError

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig

_WAY_OUT = "Use the config.json that belongs to the weights."


def count(
    config: ModelConfig, key: str, *, default: int | None = None, minimum: int = 1
) -> int:
    """The whole number ``key``, at least ``minimum``; ``default`` if it is absent or null.

    Raises:
        CheckpointError: It is absent and has no default, or it is no such number.
    """
    value = config.require(key) if default is None else config.get(key, default)
    return checked(config, key, value, minimum=minimum)


def checked(config: ModelConfig, key: str, value: Any, *, minimum: int = 1) -> int:
    """``value``, which the field ``key`` has, as a whole number of at least ``minimum``.

    Raises:
        CheckpointError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise contradiction(config, f"{key} is {value!r}, not a whole number from {minimum}")
    return value


def flag(config: ModelConfig, key: str, *, default: bool | None = None) -> bool:
    """The switch ``key``; ``default`` if it is absent or null.

    Raises:
        CheckpointError: It is absent and has no default, or it is neither true nor false.
    """
    value = config.require(key) if default is None else config.get(key, default)
    if not isinstance(value, bool):
        raise contradiction(config, f"{key} is {value!r}, neither true nor false")
    return value


def per_layer(config: ModelConfig, key: str, known: Sequence[Any]) -> tuple[Any, ...]:
    """The list (or string) ``key`` that has one entry for each layer, each one of ``known``.

    Raises:
        CheckpointError: It is absent, of another length than num_hidden_layers, or has an
            entry that is not known.
    """
    values = config.require(key)
    if not isinstance(values, (list, str)) or len(values) != config.num_layers:
        size = len(values) if isinstance(values, (list, str)) else "no"
        raise contradiction(
            config, f"{key} has {size} entries for num_hidden_layers {config.num_layers}"
        )
    if unknown := [value for value in values if value not in known]:
        names = ", ".join(map(repr, known))
        raise contradiction(config, f"{key} has the unknown entry {unknown[0]!r} (known: {names})")
    return tuple(values)


def contradiction(config: ModelConfig, problem: str) -> CheckpointError:
    """The error of a config.json whose fields cannot be true together."""
    return CheckpointError(config.path, f"{problem}.", _WAY_OUT)
