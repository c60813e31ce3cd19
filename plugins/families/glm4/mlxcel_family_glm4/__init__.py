"""The GLM family: GLM-4, GLM-4.5 and later with experts, and their lite mixtures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family, fields
from mlxcel.family.attention import QK_NORMS, Attention, LatentAttention
from mlxcel.family.shapes import (
    PRE_NORMS,
    TensorShape,
    block,
    decoder,
    deepseek_feed_forward,
    linear,
)
from mlxcel.tensor.shard import column, row

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage


class Glm4(Family):
    """Full attention, gate and up projection in one, four norms in each layer."""

    api_version = "1.0"
    wire_names = ("glm4",)

    def tied(self, config: ModelConfig) -> bool:
        """Never: mlx-lm's model always has a head of its own."""
        return False

    def ignored(self, config: ModelConfig) -> tuple[str, ...]:
        return fields.rope_scaling(config)

    def mixer(self, config: ModelConfig) -> Attention | LatentAttention:
        """The attention of every layer."""
        return Attention.of(config, bias=fields.flag(config, "attention_bias"))

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention = self.mixer(config)

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            return self.layer(name, index, attention.shapes(f"{name}.self_attn"), config)

        return decoder(config, layer, tied=False)

    def layer(
        self, name: str, index: int, attention: Iterator[TensorShape], config: ModelConfig
    ) -> Iterator[TensorShape]:
        """Layer ``index`` around its attention."""
        hidden = fields.count(config, "hidden_size")
        inner = fields.count(config, "intermediate_size")
        return block(
            name,
            hidden,
            attention,
            linear(
                f"{name}.mlp.gate_up_proj", 2 * inner, hidden, shard=column(segments=(inner,) * 2)
            ),
            linear(f"{name}.mlp.down_proj", hidden, inner, shard=row()),
            norms=(*PRE_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
        )

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        return (self.mixer(config).cache(),) * config.num_layers


class Glm4Moe(Glm4):
    """Full attention, experts in all layers but the first ones; draft layers at the end."""

    wire_names = ("glm4_moe",)

    def mixer(self, config: ModelConfig) -> Attention | LatentAttention:
        norms = QK_NORMS if fields.flag(config, "use_qk_norm") else ()
        return Attention.of(config, bias=fields.flag(config, "attention_bias"), norms=norms)

    def layer(
        self, name: str, index: int, attention: Iterator[TensorShape], config: ModelConfig
    ) -> Iterator[TensorShape]:
        mlp = deepseek_feed_forward(config, f"{name}.mlp", index)
        return block(name, fields.count(config, "hidden_size"), attention, mlp)

    def casts(self, name: str) -> bool:
        """The bias that decides between experts stays as precise as it is stored."""
        return not name.endswith(".e_score_correction_bias")


class Glm4MoeLite(Glm4Moe):
    """The same with latent attention."""

    wire_names = ("glm4_moe_lite",)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_glm4.stage import LatentStage

        return LatentStage

    def ignored(self, config: ModelConfig) -> tuple[str, ...]:
        return ()

    def mixer(self, config: ModelConfig) -> Attention | LatentAttention:
        return LatentAttention.of(config, bias=fields.flag(config, "attention_bias", default=False))


glm4, glm4_moe, glm4_moe_lite = Glm4(), Glm4Moe(), Glm4MoeLite()
