"""Layers of a Qwen3-Next: most keep the tail of a convolution and a state matrix per head."""

from __future__ import annotations

import mlx.nn as nn

from mlxcel.family.transformer import Mask, TransformerStage


class Qwen3NextStage(TransformerStage):
    """The shared base, with recurrent layers."""

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        return Mask("ssm") if layer.is_linear else Mask("full")
