"""Layers of a DeepSeek V3."""

from __future__ import annotations

import re
from collections import defaultdict

import mlx.core as mx
import mlx.nn as nn

from mlxcel.family.transformer import Mask, TransformerStage

Weights = dict[str, mx.array]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


class DeepseekV3Stage(TransformerStage):
    """The shared base, with latent attention, which adds its mask itself."""

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        return Mask("array")

    @classmethod
    def sanitize(cls, model: nn.Module, weights: Weights) -> Weights:
        """mlx-lm's ``sanitize``, each layer under the number 0.

        It takes every name that begins with ``model.layers.61`` for the trailer, which in a
        model of more than 61 layers is a layer like the others. The real trailer is not in
        ``weights``.
        """
        layers: dict[int | None, Weights] = defaultdict(dict)
        for name, value in weights.items():
            if match := _LAYER.fullmatch(name):
                layers[int(match[1])][f"model.layers.0.{match[2]}"] = value
            else:
                layers[None][name] = value
        return {
            name if index is None else name.replace(".0.", f".{index}.", 1): value
            for index, layer in layers.items()
            for name, value in model.sanitize(layer).items()
        }
