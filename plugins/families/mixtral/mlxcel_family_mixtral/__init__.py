"""The Mixtral family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family, fields
from mlxcel.family.attention import Attention
from mlxcel.family.shapes import TensorShape, block, decoder, linear_moe

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind


class Mixtral(Family):
    """Full attention, and experts in every layer."""

    api_version = "1.0"
    wire_names = ("mixtral",)

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention = _attention(config)
        hidden, inner = attention.hidden, fields.count(config, "intermediate_size")
        experts = fields.count(config, "num_local_experts")

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            moe = linear_moe(f"{name}.block_sparse_moe", hidden, experts, inner)
            return block(name, hidden, attention.shapes(f"{name}.self_attn"), moe)

        return decoder(config, layer, tied=self.tied(config))

    def ignored(self, config: ModelConfig) -> tuple[str, ...]:
        return (*fields.rope_scaling(config), *fields.window(config))

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        return (_attention(config).cache(),) * config.num_layers


def _attention(config: ModelConfig) -> Attention:
    return Attention.of(config, own_head_dim=False)


plugin = Mixtral()
