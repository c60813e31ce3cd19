"""Layers of a Gemma 3 text tower."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxcel.family.transformer import Mask, Payload, TransformerStage


class Gemma3Stage(TransformerStage):
    """The shared base, with sliding layers and a scaled embedding."""

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        return Mask("sliding", self.inner.window_size) if layer.self_attn.is_sliding else Mask()

    def embed(self, tokens: mx.array) -> Payload:
        """Times the root of the hidden size, rounded as the model was trained: in bfloat16."""
        h = self.inner.embed_tokens(tokens)
        scale = mx.array(self.inner.args.hidden_size**0.5, mx.bfloat16)
        return {"h": h * scale.astype(h.dtype)}
