"""Layers of a Llama 4 text tower.

Three layers of four see only the chunk of the context that they are in; mlx-lm drops what is
before it, which leaves nothing to merge sequences by. Here every layer keeps all keys and
values, and a mask says what it sees.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.llama4 import Attention

from mlxcel.checkpoint.config import ModelConfig
from mlxcel.family.fields import count
from mlxcel.family.transformer import Cache, Mask, TransformerStage


class TemperedAttention(Attention):
    """mlx-lm's attention without rotary embedding, in batches too.

    Queries grow with the logarithm of their position, which is each row's own.
    """

    def __call__(self, x: mx.array, mask: Any = None, cache: Cache = None) -> mx.array:
        """One step: [rows, length, hidden] to the same, ``cache`` moved on."""
        queries, keys, values = (
            mx.unflatten(projection(x), -1, (-1, self.head_dim)).swapaxes(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries = (queries * self._temperature(cache.offset, x.shape[1])).astype(queries.dtype)
        keys, values = cache.update_and_fetch(keys, values)
        out = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return self.o_proj(mx.flatten(out.swapaxes(1, 2), -2))

    def _temperature(self, offset: int | mx.array, length: int) -> mx.array:
        """What queries are multiplied with: [rows or 1, 1, length, 1]."""
        seen = mx.array(offset).reshape(-1, 1, 1, 1) + mx.arange(1, length + 1)[:, None]
        return mx.log(mx.floor(seen / self.floor_scale) + 1.0) * self.attn_scale + 1.0


class Llama4Stage(TransformerStage):
    """The shared base, with chunks."""

    @classmethod
    def build_model(cls, config: ModelConfig) -> nn.Module:
        count(config, "attention_chunk_size")  # mlx-lm takes anything, until it divides by it
        model = super().build_model(config)
        for index, layer in enumerate(model.layers):
            if layer.self_attn.attn_temperature_tuning and not layer.self_attn.use_rope:
                layer.self_attn = TemperedAttention(layer.args, index)
        return model

    def find_caches(self, model: nn.Module) -> list[Cache | None]:
        return [KVCache() for _ in model.layers]

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        if layer.self_attn.use_rope:
            return Mask("chunk", self.inner.attention_chunk_size)
        return Mask("full")
