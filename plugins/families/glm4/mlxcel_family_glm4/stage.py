"""Layers of a GLM lite."""

from __future__ import annotations

import mlx.nn as nn

from mlxcel.family.transformer import Mask, TransformerStage


class LatentStage(TransformerStage):
    """The shared base; attention to latents adds its mask itself."""

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        return Mask("array")
