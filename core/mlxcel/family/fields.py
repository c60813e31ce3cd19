"""The fields of config.json that families plan with, read under a check.

Every function raises a :class:`~mlxcel.errors.CheckpointError` that names config.json and the
field, so that a family needs no checks of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlxcel.checkpoint.rope import ROPE_PARAMETERS, rope_scaling_of
from mlxcel.errors import CheckpointError
from mlxcel.errors.words import counted

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"
_WAY_OUT = "Use the config.json that belongs to the weights."


def count(config: ModelConfig, key: str, *, default: int | None = None, minimum: int = 1) -> int:
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


def per_layer(
    config: ModelConfig,
    key: str,
    known: Sequence[Any],
    *,
    default: Callable[[int], Any] | None = None,
) -> tuple[Any, ...]:
    """The list (or string) ``key`` that has one entry for each layer, each one of ``known``.

    Args:
        default: The entry of a layer, by its index, where the list is absent or null.

    Raises:
        CheckpointError: It is absent and has no default, it is of another length than
            num_hidden_layers, or it has an entry that is not known.
    """
    if config.get(key) is None and default is not None:
        return tuple(map(default, range(config.num_layers)))
    values = config.require(key)
    if not isinstance(values, list | str):
        raise contradiction(config, f"{key} is {values!r}, not a list with an entry per layer")
    if len(values) != config.num_layers:
        raise contradiction(
            config,
            f"{key} has {counted(len(values), 'entry', 'entries')}, "
            f"num_hidden_layers is {config.num_layers}",
        )
    if unknown := [value for value in values if value not in known]:
        names = ", ".join(map(repr, known))
        raise contradiction(config, f"{key} has the unknown entry {unknown[0]!r} (known: {names})")
    return tuple(values)


def nested(config: ModelConfig) -> bool:
    """Whether the language model's settings stand in a ``text_config`` of their own."""
    return isinstance(config.raw.get("text_config"), dict)


def attention_types(config: ModelConfig, default: Callable[[int], str]) -> tuple[str, ...]:
    """The ``layer_types`` of a model whose layers are of full or of sliding attention.

    Args:
        default: The type of a layer, by its index, where config.json does not list them.

    Raises:
        CheckpointError: There is not one known type per layer.
    """
    return per_layer(config, "layer_types", (FULL, SLIDING), default=default)


def rope_scaling(config: ModelConfig) -> tuple[str, ...]:
    """The field that asks for rescaled positions (YaRN, Llama 3 and others), if there is one."""
    if rope_scaling_of(config.text) is None:
        return ()
    return ("rope_scaling",) if config.get("rope_scaling") else (ROPE_PARAMETERS,)


def window(
    config: ModelConfig,
    *,
    switch: str | None = None,
    first: str | None = None,
    by_layer: bool = False,
) -> tuple[str, ...]:
    """The field that asks for sliding attention where mlx-lm's model has none, if there is one.

    Args:
        switch: The field that must be true for that, where it is needed.
        first: The field with the first layer that slides, where ``layer_types`` does not say it.
        by_layer: mlx-lm's model slides in the layers that ``layer_types`` names.
    """
    if config.get("sliding_window") is None or (switch and config.get(switch) is not True):
        return ()
    if (types := config.get("layer_types")) is not None:
        slides = not by_layer and isinstance(types, list) and SLIDING in types
    else:
        start = config.get(first) if first else 0
        slides = not isinstance(start, int) or start < config.num_layers
    return ("sliding_window",) if slides else ()


def experts_by_step(config: ModelConfig, index: int) -> bool:
    """Whether layer ``index`` has experts, as Qwen says it: every n-th layer but some.

    Raises:
        CheckpointError: ``mlp_only_layers`` is no list, or a count is none.
    """
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise contradiction(config, f"mlp_only_layers is {dense!r}, not a list of layers")
    if index in dense or not count(config, "num_experts", minimum=0):
        return False
    return (index + 1) % count(config, "decoder_sparse_step", default=1) == 0


def experts_after_dense(config: ModelConfig, index: int) -> bool:
    """Whether layer ``index`` may have experts, as DeepSeek says it: not among the first ones.

    Raises:
        CheckpointError: ``first_k_dense_replace`` or ``moe_layer_freq`` is no count.
    """
    first = count(config, "first_k_dense_replace", default=0, minimum=0)
    return index >= first and index % count(config, "moe_layer_freq", default=1) == 0


def contradiction(config: ModelConfig, problem: str) -> CheckpointError:
    """The error of a config.json whose fields cannot be true together."""
    return CheckpointError(config.path, f"{problem}.", _WAY_OUT)
