"""The Nemotron-H family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family, Part, Place, fields
from mlxcel.family.attention import Attention
from mlxcel.family.recurrence import Mamba2
from mlxcel.family.shapes import (
    TensorShape,
    corrected_router,
    embedding,
    experts,
    linear,
    norm,
)
from mlxcel.tensor.shard import VOCAB, column, row

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
_KINDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "conv": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}


class NemotronH(Family):
    """One mechanism per layer: Mamba-2, attention, an MLP or experts."""

    api_version = "1.0"
    wire_names = ("nemotron_h",)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_nemotron_h.stage import NemotronHStage

        return NemotronHStage

    def tied(self, config: ModelConfig) -> bool:
        """Never: mlx-lm's model always has a head of its own."""
        return False

    def casts(self, name: str) -> bool:
        """The bias that decides between experts and the decay of the state stay precise."""
        return not name.endswith((".e_score_correction_bias", ".A_log"))

    def place(self, name: str, config: ModelConfig) -> Place:
        if name.startswith("backbone.embeddings."):
            return Place(Part.TABLE)
        if name.startswith("backbone.norm_f."):
            return Place(Part.HEAD)
        return super().place(name, config)

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        hidden, vocab = fields.count(config, "hidden_size"), fields.count(config, "vocab_size")
        yield from embedding("backbone.embeddings", vocab, hidden)
        for index, kind in enumerate(layer_kinds(config)):
            name = f"backbone.layers.{index}"
            yield from norm(f"{name}.norm", hidden)
            match kind:
                case "M":
                    yield from Mamba2.of(config).shapes(f"{name}.mixer")
                case "*":
                    yield from _attention(config).shapes(f"{name}.mixer")
                case "-":
                    inner = fields.count(config, "intermediate_size")
                    yield from _mlp(f"{name}.mixer", hidden, inner, config)
                case "E":
                    yield from _moe(f"{name}.mixer", hidden, config)
        yield from norm("backbone.norm_f", hidden)
        yield from linear("lm_head", vocab, hidden, shard=VOCAB)

    def caches(self, config: ModelConfig) -> tuple[CacheKind | None, ...]:
        """Only Mamba and attention keep anything."""
        kinds = layer_kinds(config)
        kept: dict[str, CacheKind | None] = {
            MAMBA: Mamba2.of(config).cache() if MAMBA in kinds else None,
            ATTENTION: _attention(config).cache() if ATTENTION in kinds else None,
        }
        return tuple(kept.get(kind) for kind in kinds)


def layer_kinds(config: ModelConfig) -> tuple[str, ...]:
    """What each layer is, as one letter of ``hybrid_override_pattern``.

    Raises:
        CheckpointError: The pattern does not have one known entry per layer.
    """
    if config.get("hybrid_override_pattern") is None:
        for key in ("layers_block_type", "layer_types"):
            if config.get(key) is not None:
                return tuple(_KINDS[kind] for kind in fields.per_layer(config, key, [*_KINDS]))
    known = (MAMBA, ATTENTION, MLP, EXPERTS)
    return fields.per_layer(config, "hybrid_override_pattern", known)


def _attention(config: ModelConfig) -> Attention:
    bias = fields.flag(config, "attention_bias")
    return Attention.of(config, bias=bias, out_bias=bias)


def _mlp(
    name: str, hidden: int, inner: int, config: ModelConfig, *, at_once: bool = False
) -> Iterator[TensorShape]:
    bias, down = fields.flag(config, "mlp_bias"), row(at_once=at_once)
    yield from linear(f"{name}.up_proj", inner, hidden, bias=bias, shard=column())
    yield from linear(f"{name}.down_proj", hidden, inner, bias=bias, shard=down)


def _moe(name: str, hidden: int, config: ModelConfig) -> Iterator[TensorShape]:
    """Experts of two matrices, in a space of their own where there is a latent size."""
    number = fields.count(config, "n_routed_experts")
    inner = fields.count(config, "moe_intermediate_size")
    space = fields.count(config, "moe_latent_size", default=hidden)
    latent = config.get("moe_latent_size") is not None
    down = row(at_once=latent)
    yield from experts(f"{name}.switch_mlp.fc1", number, inner, space, shard=column())
    yield from experts(f"{name}.switch_mlp.fc2", number, space, inner, shard=down)
    yield from corrected_router(f"{name}.gate", number, hidden)
    if config.get("n_shared_experts") is not None:
        shared = fields.count(config, "moe_shared_expert_intermediate_size")
        yield from _mlp(f"{name}.shared_experts", hidden, shared, config, at_once=latent)
    if latent:
        bias = fields.flag(config, "mlp_bias")
        yield from linear(f"{name}.fc1_latent_proj", space, hidden, bias=bias)
        yield from linear(f"{name}.fc2_latent_proj", hidden, space, bias=bias)


plugin = NemotronH()
