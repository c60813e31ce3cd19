"""The DeepSeek V3 family: V3, R1, and what mlx-lm runs with the same class."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from mlxcel.family import Family, fields
from mlxcel.family.attention import LatentAttention
from mlxcel.family.shapes import TensorShape, block, decoder, deepseek_feed_forward
from mlxcel.family.unpacked import float8_as_bfloat16, packed_integers

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.checkpoint.headers import TensorHeader
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage

_TRAILER_PARTS = frozenset({"eh_proj", "enorm", "hnorm", "shared_head"})


class DeepseekV3(Family):
    """Latent attention and experts; a trailer for multi-token prediction that is never read."""

    api_version = "1.0"
    wire_names = ("deepseek_v3",)
    model_types = ("kimi_k2", "joyai_llm_flash")

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_deepseek_v3.stage import DeepseekV3Stage

        return DeepseekV3Stage

    def tied(self, config: ModelConfig) -> bool:
        """Never: mlx-lm's model always has a head of its own."""
        return False

    def casts(self, name: str) -> bool:
        """The bias that decides between experts stays as precise as it is stored."""
        return not name.endswith(".e_score_correction_bias")

    def settle(self, config: ModelConfig, tensors: Collection[str]) -> ModelConfig:
        """``config`` without the trailer, where num_hidden_layers counts it.

        On the hub the trailer stands behind the last layer, and nothing is to be done.
        """
        trailers = {
            parts[2]
            for parts in (name.split(".") for name in tensors)
            if parts[:2] == ["model", "layers"] and not _TRAILER_PARTS.isdisjoint(parts)
        }
        layers = config.num_layers
        while layers > 1 and str(layers - 1) in trailers:
            layers -= 1
        return config if layers == config.num_layers else config.with_layers(layers)

    def unpacks(self, config: ModelConfig) -> tuple[str, ...]:
        return ("fp8", "compressed-tensors")

    def loaded(self, tensors: Mapping[str, TensorHeader]) -> Mapping[str, TensorHeader]:
        """Float8 blocks become bfloat16; packed integers get a zero point beside each scale."""
        return packed_integers(float8_as_bfloat16(tensors))

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        """As on the hub, where num_hidden_layers does not count the trailer."""
        attention = _attention(config)

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            mlp = deepseek_feed_forward(config, f"{name}.mlp", index)
            return block(name, attention.hidden, attention.shapes(f"{name}.self_attn"), mlp)

        return decoder(config, layer, tied=False)

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        return (_attention(config).cache(),) * config.num_layers


def _attention(config: ModelConfig) -> LatentAttention:
    return LatentAttention.of(config, bias=fields.flag(config, "attention_bias", default=False))


plugin = DeepseekV3()
