"""Layers of a Qwen 3.5 text tower.

Most layers keep no keys and values, but the tail of a convolution and a state matrix per
head, and read a mask of real tokens against padding. All of it belongs to the layer itself,
so only hidden states cross a boundary.
"""

from __future__ import annotations

import copy

import mlx.nn as nn
from mlx_lm.models.qwen3_5 import Model, ModelArgs

from mlxcel.checkpoint.config import ModelConfig
from mlxcel.family.transformer import Mask, TransformerStage


class Qwen35Stage(TransformerStage):
    """The shared base, with recurrent layers."""

    @classmethod
    def build_model(cls, config: ModelConfig) -> nn.Module:
        # mlx-lm knows one model_type of the two, and its arguments change what they are given
        return Model(ModelArgs.from_dict(copy.deepcopy(config.raw)))

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        return Mask("ssm") if layer.is_linear else Mask("full")
