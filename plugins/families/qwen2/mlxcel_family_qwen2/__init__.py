"""The Qwen 2 family: Qwen 2 and 2.5, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family, fields
from mlxcel.family.attention import Attention
from mlxcel.family.shapes import TensorShape, block, decoder, gated_mlp, linear_moe

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind


class Qwen2(Family):
    """Full attention with biases on queries, keys and values."""

    api_version = "1.0"
    wire_names = ("qwen2",)
    tied_by_default = True

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention = _attention(config)

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            mlp = self.feed_forward(f"{name}.mlp", attention.hidden, config)
            return block(name, attention.hidden, attention.shapes(f"{name}.self_attn"), mlp)

        return decoder(config, layer, tied=self.tied(config))

    def feed_forward(self, name: str, hidden: int, config: ModelConfig) -> Iterator[TensorShape]:
        """What follows attention in every layer."""
        return gated_mlp(name, hidden, fields.count(config, "intermediate_size"))

    def ignored(self, config: ModelConfig) -> tuple[str, ...]:
        return fields.window(config, switch="use_sliding_window", first="max_window_layers")

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        return (_attention(config).cache(),) * config.num_layers


class Qwen2Moe(Qwen2):
    """Experts in every layer, and one that every token passes."""

    wire_names = ("qwen2_moe",)
    tied_by_default = False

    def ignored(self, config: ModelConfig) -> tuple[str, ...]:
        return (*fields.rope_scaling(config), *super().ignored(config))

    def feed_forward(self, name: str, hidden: int, config: ModelConfig) -> Iterator[TensorShape]:
        return linear_moe(
            name,
            hidden,
            fields.count(config, "num_experts"),
            fields.count(config, "moe_intermediate_size"),
            shared=fields.count(config, "shared_expert_intermediate_size"),
        )


def _attention(config: ModelConfig) -> Attention:
    return Attention.of(config, own_head_dim=False, bias=True)


qwen2, qwen2_moe = Qwen2(), Qwen2Moe()
