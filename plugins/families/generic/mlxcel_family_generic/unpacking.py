"""Which of mlx-lm's other models unpack the tensors of another tool, and what they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import attrs

from mlxcel.family.unpacked import (
    float8_as_bfloat16,
    packed_experts,
    packed_float8,
    packed_integers,
)

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.checkpoint.headers import TensorHeader

Tensors = Mapping[str, "TensorHeader"]
Unpacking = Mapping[str, Callable[[Tensors], Tensors]]
"""By the ``quant_method``."""


def _ternary(tensors: Tensors) -> Tensors:
    """BitNet's own layers have a ``weight_scale``; elsewhere that is what a tool left over."""
    return {
        (new := name.replace(".weight_scale", ".scale")): attrs.evolve(header, name=new)
        for name, header in tensors.items()
    }


_FLOAT8: Unpacking = {"fp8": float8_as_bfloat16}
_BOTH: Unpacking = {**_FLOAT8, "compressed-tensors": packed_integers}
_BY_TYPE: Mapping[str, Unpacking] = {
    "bitnet": {"bitnet": _ternary},
    "deepseek_v32": _FLOAT8,
    "kimi_k25": _BOTH,
    "mimo_v2_flash": _FLOAT8,
    "minimax": _FLOAT8,
    "minimax_m2": _FLOAT8,
    "minimax_m3_vl": {"fp8": packed_float8},
    "mistral4": _BOTH,
    "muse_spark": {"modelopt": packed_experts},
}
"""Ministral 3 is none of them: mlx-lm multiplies its float8 as if they were whole numbers."""

_AROUND_ANOTHER = ("mistral3", "llava")


def unpacking(config: ModelConfig) -> Unpacking:
    """What the model of ``config`` unpacks."""
    model_type = config.model_type
    if model_type in _AROUND_ANOTHER:
        model_type = str(config.text.get("model_type"))
    return _BY_TYPE.get(model_type, {})
