"""The GLM family with sparse attention (GLM-5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mlxcel.family import Family, fields
from mlxcel.family.attention import LatentAttention
from mlxcel.family.caches import CacheGroup, KVCacheKind
from mlxcel.family.shapes import TensorShape, block, decoder, deepseek_feed_forward, linear, norm
from mlxcel.family.unpacked import float8_as_bfloat16

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.checkpoint.headers import TensorHeader
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage


class GlmMoeDsa(Family):
    """Latent attention to the positions that an indexer finds, and experts."""

    api_version = "1.0"
    wire_names = ("glm_moe_dsa",)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_glm_moe_dsa.stage import GlmMoeDsaStage

        return GlmMoeDsaStage

    def tied(self, config: ModelConfig) -> bool:
        """Never: mlx-lm's model always has a head of its own."""
        return False

    def casts(self, name: str) -> bool:
        """The bias that decides between experts stays as precise as it is stored."""
        return not name.endswith(".e_score_correction_bias")

    def unpacks(self, config: ModelConfig) -> tuple[str, ...]:
        return ("fp8",)

    def loaded(self, tensors: Mapping[str, TensorHeader]) -> Mapping[str, TensorHeader]:
        """Float8 blocks become bfloat16."""
        return float8_as_bfloat16(tensors)

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention = _attention(config)

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            return block(
                name,
                attention.hidden,
                attention.shapes(f"{name}.self_attn"),
                _indexer(f"{name}.self_attn.indexer", attention, config),
                deepseek_feed_forward(config, f"{name}.mlp", index),
            )

        return decoder(config, layer, tied=False)

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        """The latents, and the keys of the indexer, beside which mlx-lm keeps as many zeros."""
        dim = fields.count(config, "index_head_dim")
        keys = KVCacheKind(1, dim, dim)
        return (CacheGroup((_attention(config).cache(), keys)),) * config.num_layers


def _attention(config: ModelConfig) -> LatentAttention:
    fields.count(config, "q_lora_rank")  # the indexer reads the compressed queries
    return LatentAttention.of(config, bias=fields.flag(config, "attention_bias"))


def _indexer(name: str, attention: LatentAttention, config: ModelConfig) -> Iterator[TensorShape]:
    heads, dim = fields.count(config, "index_n_heads"), fields.count(config, "index_head_dim")
    yield from linear(f"{name}.wq_b", heads * dim, attention.query_rank or 0)
    yield from linear(f"{name}.wk", dim, attention.hidden)
    yield from norm(f"{name}.k_norm", dim, bias=True)
    yield from linear(f"{name}.weights_proj", heads, attention.hidden)


plugin = GlmMoeDsa()
