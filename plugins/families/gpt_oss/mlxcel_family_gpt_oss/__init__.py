"""The gpt-oss family: 20B and 120B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family, fields
from mlxcel.family.attention import QUERY_HEADS, Attention
from mlxcel.family.shapes import TensorShape, block, decoder, gated_experts, linear, vector
from mlxcel.tensor.shard import column

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage


class GptOss(Family):
    """Sliding and full attention with sinks, biases everywhere, experts in every layer."""

    api_version = "1.0"
    wire_names = ("gpt_oss",)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_gpt_oss.stage import GptOssStage

        return GptOssStage

    def tied(self, config: ModelConfig) -> bool:
        """Never: mlx-lm's model always has a head of its own."""
        return False

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention = _attention(config)
        heads = attention.heads
        hidden, inner = attention.hidden, fields.count(config, "intermediate_size")
        experts = fields.count(config, "num_local_experts")
        by_head = column(heads, axis=-1, what=QUERY_HEADS)

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            return block(
                name,
                hidden,
                attention.shapes(f"{name}.self_attn"),
                vector(f"{name}.self_attn.sinks", heads, shard=by_head),
                linear(f"{name}.mlp.router", experts, hidden, bias=True),
                gated_experts(f"{name}.mlp.experts", experts, hidden, inner, bias=True),
            )

        return decoder(config, layer, tied=False)

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        """Without ``layer_types`` every second layer is full, the first is sliding."""
        types = fields.attention_types(
            config, lambda index: fields.FULL if index % 2 else fields.SLIDING
        )
        return _attention(config).caches(config, types)


def _attention(config: ModelConfig) -> Attention:
    return Attention.of(config, bias=True, out_bias=True)


plugin = GptOss()
