"""Everything mlxcel takes from mlx-lm that may move between its versions.

Importing this module imports mlx_lm, and with it transformers (1.5 s): only code that
builds and runs models does so.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import make_prompt_cache

__all__ = [
    "create_attention_mask",
    "create_ssm_mask",
    "empty_model",
    "infer_quantization",
    "make_prompt_cache",
    "unpack_awq",
]

_BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (32, 64, 128)


def empty_model(config: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's own model for ``config``, its parameters never evaluated.

    Args:
        config: The content of config.json; it is not changed.

    Raises:
        ValueError: mlx-lm has no such ``model_type``.
        TypeError, KeyError, …: whatever the model's class makes of a field it cannot use.
    """
    own = copy.deepcopy(dict(config))
    model_class, args_class = utils._get_classes(own)
    return cast(nn.Module, model_class(args_class.from_dict(own)))


def infer_quantization(
    path: str, module: nn.Module, weights: Mapping[str, mx.array]
) -> dict[str, Any]:
    """How the packed tensor of ``path`` was quantized, read off its shapes.

    Returns:
        ``group_size``, ``bits`` and ``mode``, and ``global_scale`` where one is stored.

    Raises:
        ValueError: The shapes fit no mode that MLX knows.
    """
    if f"{path}.weight" not in weights:
        raise ValueError("it has scales and no weight")
    found = dict(utils.infer_quant_config(path, module, dict(weights)))
    bits, group_size = found["bits"], found["group_size"]
    # mlx-lm only divides; what fits no kernel would raise later, without a name.
    if found["mode"] == "affine" and (bits not in _BITS or group_size not in _GROUP_SIZES):
        raise ValueError(f"{bits} bits in groups of {group_size}")
    if f"{path}.global_scale" in weights:
        found["global_scale"] = True
    return found


def unpack_awq(weights: dict[str, mx.array], settings: Mapping[str, Any]) -> dict[str, mx.array]:
    """AutoAWQ and GPTQ tensors repacked as MLX packs them."""
    repacked, _ = utils._transform_awq_weights(weights, dict(settings))
    return repacked
