"""A tiny model of an architecture with drawn parameters, and its checkpoint."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlxcel.family.transformer import flat_parameters
from mlxcel.testing.survey.configs import tiny_config
from mlxcel.testing.tiny.builder import quantize_in_place, write_weights
from mlxcel.testing.tiny.recipe import draw
from mlxcel.testing.tiny.tokenizer import write_tokenizer


def build(architecture: str, out: Path, *, quantize: str | None = None) -> Path:
    """Write the tiny checkpoint of ``architecture`` with its tokenizer into the folder ``out``.

    Args:
        quantize: ``"bits:group"``, as :func:`mlxcel.testing.tiny.build` takes it.
    """
    config = tiny_config(architecture)
    write_model(draw_model(architecture, config), config, out, quantize=quantize)
    write_tokenizer(out)
    return out


def draw_model(architecture: str, config: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's model of ``config`` with drawn parameters, in float32, the same every time."""
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(dict(config)))
    bits = np.random.PCG64(0)
    drawn = []
    for path, value in sorted(flat_parameters(model).items()):
        if mx.issubdtype(value.dtype, mx.floating):
            numbers = draw(bits, f"model.{path}", value.shape or (1,), tied=False)
            value = mx.array(numbers).reshape(value.shape)
        drawn.append((path, value))
    model.update(tree_unflatten(drawn))
    model.eval()
    mx.eval(flat_parameters(model))
    return model


def write_model(
    model: nn.Module, config: Mapping[str, Any], out: Path, *, quantize: str | None = None
) -> Path:
    """Write ``model`` in mlx-lm's layout into the folder ``out``; quantizes it in place."""
    settings = quantize_in_place(model, config, quantize, {}) if quantize else config
    write_weights(out, flat_parameters(model), settings, 1, "mlx")
    return out
