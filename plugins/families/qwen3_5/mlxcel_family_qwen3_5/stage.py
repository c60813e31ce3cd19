"""Layers of a Qwen 3.5 text tower.

Most layers keep no keys and values, but the tail of a convolution and a state matrix per
head, and read a mask of real tokens against padding. All of it belongs to the layer itself,
so only hidden states cross a boundary.
"""

from __future__ import annotations

import copy

import mlx.nn as nn
from mlx_lm.models import qwen3_5, qwen3_5_moe

from mlxcel.checkpoint.config import ModelConfig
from mlxcel.family.transformer import Mask, TransformerStage


class Qwen35Stage(TransformerStage):
    """The shared base, with recurrent layers."""

    @classmethod
    def build_model(cls, config: ModelConfig) -> nn.Module:
        # mlx-lm knows one model_type of the two, and its arguments change what they are given
        return qwen3_5.Model(qwen3_5.ModelArgs.from_dict(copy.deepcopy(config.raw)))

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        return Mask("ssm") if layer.is_linear else Mask("full")


class Qwen35MoeStage(Qwen35Stage):
    """The same with experts."""

    @classmethod
    def build_model(cls, config: ModelConfig) -> nn.Module:
        return qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(copy.deepcopy(config.raw)))
