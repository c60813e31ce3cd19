"""The Qwen 3 family, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family, fields
from mlxcel.family.attention import QK_NORMS, Attention
from mlxcel.family.shapes import TensorShape, block, decoder, gated_mlp, linear_moe

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind


class Qwen3(Family):
    """Full attention with norms on queries and keys."""

    api_version = "1.0"
    wire_names = ("qwen3",)

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention = Attention.of(config, norms=QK_NORMS)

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            mlp = self.feed_forward(f"{name}.mlp", attention.hidden, index, config)
            return block(name, attention.hidden, attention.shapes(f"{name}.self_attn"), mlp)

        return decoder(config, layer, tied=self.tied(config))

    def feed_forward(
        self, name: str, hidden: int, index: int, config: ModelConfig
    ) -> Iterator[TensorShape]:
        """What follows attention in layer ``index``."""
        return gated_mlp(name, hidden, fields.count(config, "intermediate_size"))

    def ignored(self, config: ModelConfig) -> tuple[str, ...]:
        return fields.window(config, switch="use_sliding_window", first="max_window_layers")

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        return (Attention.of(config).cache(),) * config.num_layers


class Qwen3Moe(Qwen3):
    """Experts in all layers but some."""

    wire_names = ("qwen3_moe",)

    def ignored(self, config: ModelConfig) -> tuple[str, ...]:
        """The original slides in all layers, whatever ``max_window_layers`` says."""
        window = fields.window(config, switch="use_sliding_window")
        return (*fields.rope_scaling(config), *window)

    def feed_forward(
        self, name: str, hidden: int, index: int, config: ModelConfig
    ) -> Iterator[TensorShape]:
        if not fields.experts_by_step(config, index):
            return super().feed_forward(name, hidden, index, config)
        inner = fields.count(config, "moe_intermediate_size")
        return linear_moe(name, hidden, fields.count(config, "num_experts"), inner)


qwen3, qwen3_moe = Qwen3(), Qwen3Moe()
