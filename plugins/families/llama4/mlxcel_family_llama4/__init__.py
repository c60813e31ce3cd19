"""The Llama 4 family: the text tower of Scout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family
from mlxcel.family.attention import Attention
from mlxcel.family.fields import count, flag
from mlxcel.family.shapes import TensorShape, block, decoder, gated_experts, gated_mlp, linear

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage


class Llama4(Family):
    """Three layers of chunked attention to one of full, experts in some layers or in all.

    A checkpoint of ``llama4_text`` is not served: mlx-lm knows that name for another model.
    """

    api_version = "1.0"
    wire_names = ("llama4",)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_llama4.stage import Llama4Stage

        return Llama4Stage

    def tied(self, config: ModelConfig) -> bool:
        """Never: mlx-lm's model always has a head of its own."""
        return False

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention = _attention(config)
        hidden, experts = attention.hidden, count(config, "num_local_experts")
        inner, wide = count(config, "intermediate_size"), count(config, "intermediate_size_mlp")
        step = count(config, "interleave_moe_layer_step")

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            parts, feed_forward = [attention.shapes(f"{name}.self_attn")], f"{name}.feed_forward"
            if (index + 1) % step == 0:
                parts.append(gated_experts(f"{feed_forward}.experts", experts, hidden, inner))
                parts.append(linear(f"{feed_forward}.router", experts, hidden))
                parts.append(gated_mlp(f"{feed_forward}.shared_expert", hidden, inner))
            else:
                parts.append(gated_mlp(feed_forward, hidden, wide))
            return block(name, hidden, *parts)

        return decoder(config, layer, tied=False, prefix="language_model.")

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        """All keys and values in every layer, also where only a chunk of them is seen."""
        return (_attention(config).cache(),) * config.num_layers


def _attention(config: ModelConfig) -> Attention:
    bias = flag(config, "attention_bias")
    return Attention.of(config, bias=bias, out_bias=bias)


plugin = Llama4()
