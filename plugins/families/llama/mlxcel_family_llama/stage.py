"""Layers of a Llama."""

from __future__ import annotations

import mlx.nn as nn

from mlxcel.family.transformer import Mask, TransformerStage


class LlamaStage(TransformerStage):
    """The shared base, with Ministral's sliding layers."""

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        return Mask("sliding", self.inner.sliding_window) if layer.use_sliding else Mask("full")
