"""The gpt-oss family: 20B and 120B. It can be planned, but not run yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family, fields
from mlxcel.family.mixers import Attention
from mlxcel.family.shapes import TensorShape, block, decoder, gated_experts, linear, vector

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind

_TYPES = ("sliding_attention", "full_attention")


class GptOss(Family):
    """Sliding and full attention with sinks, biases everywhere, experts in every layer."""

    api_version = "1.0"
    wire_names = ("gpt_oss",)
    runnable = False

    def tied(self, config: ModelConfig) -> bool:
        """Never: mlx-lm's model always has a head of its own."""
        return False

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention = _attention(config)
        hidden, inner = attention.hidden, fields.count(config, "intermediate_size")
        experts = fields.count(config, "num_local_experts")

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            return block(
                name,
                hidden,
                attention.shapes(f"{name}.self_attn"),
                vector(f"{name}.self_attn.sinks", attention.heads),
                linear(f"{name}.mlp.router", experts, hidden, bias=True),
                gated_experts(f"{name}.mlp.experts", experts, hidden, inner, bias=True),
            )

        return decoder(config, layer, tied=False)

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        """Without ``layer_types`` every second layer is full, the first is sliding."""
        attention, window = _attention(config), fields.count(config, "sliding_window")
        types = fields.per_layer(
            config, "layer_types", _TYPES, default=lambda index: _TYPES[index % 2]
        )
        return tuple(attention.cache(window if kind == _TYPES[0] else None) for kind in types)


def _attention(config: ModelConfig) -> Attention:
    return Attention.of(config, bias=True, out_bias=True)


plugin = GptOss()
