"""The Qwen 3.5 family: the text tower."""

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


class Qwen35(Family):
    """Three layers of gated delta rule to one of gated attention."""

    api_version = "1.0"
    wire_names = ("qwen3_5", "qwen3_5_vlm")
    model_types = ("qwen3_5_text",)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_qwen3_5.stage import Qwen35Stage

        return Qwen35Stage

    def casts(self, name: str) -> bool:
        """The decay of the recurrent state stays as precise as it is stored."""
        return not name.endswith(".A_log")

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention, delta = _attention(config), GatedDelta.of(config)
        hidden = attention.hidden

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            if _is_linear(config, index):
                mixer = delta.shapes(f"{name}.linear_attn")
            else:
                mixer = attention.shapes(f"{name}.self_attn")
            return block(name, hidden, mixer, self.feed_forward(f"{name}.mlp", hidden, config))

        return decoder(config, layer, tied=self.tied(config), prefix="language_model.")

    def feed_forward(self, name: str, hidden: int, config: ModelConfig) -> Iterator[TensorShape]:
        """What follows the mixer in every layer."""
        return gated_mlp(name, hidden, fields.count(config, "intermediate_size"))

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        full, state = _attention(config).cache(), GatedDelta.of(config).cache()
        return tuple(
            state if _is_linear(config, index) else full for index in range(config.num_layers)
        )


class Qwen35Moe(Qwen35):
    """Experts in every layer, and one that every token passes."""

    wire_names = ("qwen3_5_moe", "qwen3_5_moe_vlm")
    model_types = ("qwen3_5_moe_text",)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_qwen3_5.stage import Qwen35MoeStage

        return Qwen35MoeStage

    def feed_forward(self, name: str, hidden: int, config: ModelConfig) -> Iterator[TensorShape]:
        return linear_moe(
            name,
            hidden,
            fields.count(config, "num_experts"),
            fields.count(config, "moe_intermediate_size"),
            shared=fields.count(config, "shared_expert_intermediate_size"),
        )


def _attention(config: ModelConfig) -> Attention:
    bias = fields.flag(config, "attention_bias", default=False)
    return Attention.of(config, bias=bias, out_bias=bias, norms=QK_NORMS, gated=True)


def _is_linear(config: ModelConfig, index: int) -> bool:
    return (index + 1) % fields.count(config, "full_attention_interval", default=4) != 0


plugin, moe = Qwen35(), Qwen35Moe()
