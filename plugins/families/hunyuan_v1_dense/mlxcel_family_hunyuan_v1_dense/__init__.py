"""Hunyuan's dense family: 0.5B to 7B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family, fields
from mlxcel.family.attention import Attention
from mlxcel.family.shapes import TensorShape, block, decoder, gated_mlp

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind


class HunyuanV1Dense(Family):
    """Full attention with norms on queries and keys."""

    api_version = "1.0"
    wire_names = ("hunyuan_v1_dense",)

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention = _attention(config)
        hidden, inner = attention.hidden, fields.count(config, "intermediate_size")

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            mlp = gated_mlp(f"{name}.mlp", hidden, inner)
            return block(name, hidden, attention.shapes(f"{name}.self_attn"), mlp)

        return decoder(config, layer, tied=self.tied(config))

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        return (_attention(config).cache(),) * config.num_layers


def _attention(config: ModelConfig) -> Attention:
    bias = fields.flag(config, "attention_bias", default=False)
    normed = fields.flag(config, "use_qk_norm", default=True)
    norms = ("query_layernorm", "key_layernorm") if normed else ()
    return Attention.of(config, bias=bias, out_bias=bias, norms=norms)


plugin = HunyuanV1Dense()
