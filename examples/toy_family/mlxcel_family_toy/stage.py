"""The toy family: what runs its layers. The only module that imports MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.nn as nn
from mlx_lm.models import llama

from mlxcel.family.transformer import Mask, TransformerStage

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig


class ToyStage(TransformerStage):
    """Llama blocks under another ``model_type``, which mlx-lm by itself could not load."""

    @classmethod
    def build_model(cls, config: ModelConfig) -> nn.Module:
        return llama.Model(llama.ModelArgs.from_dict(dict(config.raw)))

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        return Mask("full")
