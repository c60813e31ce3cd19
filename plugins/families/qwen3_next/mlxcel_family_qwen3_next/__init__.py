"""The Qwen3-Next family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family, fields
from mlxcel.family.attention import QK_NORMS, Attention
from mlxcel.family.recurrence import GatedDelta
from mlxcel.family.shapes import TensorShape, block, decoder, gated_mlp, linear_moe

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage


class Qwen3Next(Family):
    """Three layers of gated delta rule to one of gated attention; experts in all but some."""

    api_version = "1.0"
    wire_names = ("qwen3_next",)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_qwen3_next.stage import Qwen3NextStage

        return Qwen3NextStage

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention, delta = _attention(config), _delta(config)
        hidden = attention.hidden

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            if _is_linear(config, index):
                mixer = delta.shapes(f"{name}.linear_attn")
            else:
                mixer = attention.shapes(f"{name}.self_attn")
            return block(name, hidden, mixer, feed_forward(f"{name}.mlp", index))

        def feed_forward(name: str, index: int) -> Iterator[TensorShape]:
            if not fields.experts_by_step(config, index):
                return gated_mlp(name, hidden, fields.count(config, "intermediate_size"))
            return linear_moe(
                name,
                hidden,
                fields.count(config, "num_experts"),
                fields.count(config, "moe_intermediate_size"),
                shared=fields.count(config, "shared_expert_intermediate_size"),
            )

        return decoder(config, layer, tied=self.tied(config))

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        full, state = _attention(config).cache(), _delta(config).cache()
        return tuple(
            state if _is_linear(config, index) else full for index in range(config.num_layers)
        )


def _attention(config: ModelConfig) -> Attention:
    bias = fields.flag(config, "attention_bias", default=False)
    return Attention.of(config, bias=bias, out_bias=bias, norms=QK_NORMS, gated=True)


def _delta(config: ModelConfig) -> GatedDelta:
    return GatedDelta.of(config, fused=True)


def _is_linear(config: ModelConfig, index: int) -> bool:
    return (index + 1) % fields.count(config, "full_attention_interval", default=4) != 0


plugin = Qwen3Next()
