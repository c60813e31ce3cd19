"""Any other text model of a common shape.

From headers every model can be planned whose tensors have the usual names. From config.json
alone the sizes are estimated: grouped-query attention, and a gated MLP or experts, found by
the keys that name them; what has other parts is refused. What its layers keep of a sequence is
asked of mlx-lm's model, where it has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import attrs

from mlxcel.errors import UnsupportedError
from mlxcel.family import Batching, Family, Part, Place, fields, never_read
from mlxcel.family.attention import QK_NORMS, Attention
from mlxcel.family.shapes import (
    TensorShape,
    block,
    decoder,
    deepseek_moe,
    gated_mlp,
    linear_moe,
)
from mlxcel_family_generic import names
from mlxcel_family_generic.unpacking import unpacking

if TYPE_CHECKING:
    from pathlib import Path

    from mlxcel.checkpoint.checkpoint import Checkpoint
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage
    from mlxcel.tensor.options import TensorParallel
    from mlxcel.tensor.plan import ShardPlan
    from mlxcel_family_generic.description import Description

_FOREIGN = ("kv_lora_rank", "linear_num_value_heads", "linear_attn_config", "layers_block_type")
_FOREIGN_PREFIXES = ("mamba_", "ssm_", "conv_", "rwkv", "rnn_", "lru_", "time_step", "index_head")


class Generic(Family):
    """Estimated by structure; the last choice."""

    api_version = "1.0"
    wire_names = ("generic",)
    fallback = True

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_generic.stage import GenericStage

        return GenericStage

    def settle(self, config: ModelConfig, tensors: Collection[str]) -> ModelConfig:
        """Without an output projection in the checkpoint the embedding is it."""
        if any(map(names.is_head, tensors)):
            return config
        return attrs.evolve(config, text={**config.text, "tie_word_embeddings": True})

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint with what mlx-lm's model unpacks as it is in memory."""
        checkpoint = super().open(path)
        loaded = checkpoint.loaded
        for unpack in unpacking(checkpoint.config).values():
            loaded = unpack(loaded)
        return attrs.evolve(checkpoint, loaded=loaded)

    def unpacks(self, config: ModelConfig) -> tuple[str, ...]:
        return tuple(unpacking(config))

    def place(self, name: str, config: ModelConfig) -> Place:
        if never_read(name) or (self.tied(config) and names.is_head(name)):
            return Place(Part.UNUSED)
        return names.place(name, config.num_layers)

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention, hidden = _attention(config), fields.count(config, "hidden_size")

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            mlp = _feed_forward(f"{name}.mlp", hidden, index, config)
            return block(name, hidden, attention.shapes(f"{name}.self_attn"), mlp)

        return decoder(config, layer, tied=self.tied(config))

    def shard_plan(self, config: ModelConfig, options: TensorParallel) -> ShardPlan:
        """None: nobody knows what may be split."""
        raise UnsupportedError(
            f"A model of type {config.model_type!r} cannot be split over ranks (--tp-size).",
            "Use more pipeline stages instead (--pp-size).",
        )

    def caches(self, config: ModelConfig) -> tuple[CacheKind | None, ...]:
        """What mlx-lm's own model makes; where it has none, what the config speaks of.

        Raises:
            UnsupportedError: The model cannot be split.
        """
        try:
            return _description(config).caches
        except UnsupportedError:
            raise
        except Exception:  # mlx-lm has no such model, or none of this config
            return self._expected_caches(config)

    def batching(self, config: ModelConfig) -> Batching:
        """What mlx-lm's own model can do.

        Raises:
            UnsupportedError: The model cannot be split.
            Exception: Whatever mlx-lm raises where it can build no such model.
        """
        return _description(config).batching

    def _expected_caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        types = fields.attention_types(config, lambda index: fields.FULL)
        return _attention(config).caches(config, types)


def _description(config: ModelConfig) -> Description:
    from mlxcel_family_generic.description import describe

    return describe(config)


def _attention(config: ModelConfig) -> Attention:
    """Grouped-query attention; norms of queries and keys weigh next to nothing."""
    foreign = [
        key
        for key, value in config.text.items()
        if value is not None and (key in _FOREIGN or key.startswith(_FOREIGN_PREFIXES))
    ]
    if foreign:
        raise UnsupportedError(
            f"A model of type {config.model_type!r} cannot be planned from config.json alone: no "
            f"family knows it, and {foreign[0]!r} says that it is more than attention and MLPs.",
            "Plan it from a folder that holds the weights.",
        )
    bias = fields.flag(config, "attention_bias", default=False)
    return Attention.of(config, bias=bias, out_bias=bias, norms=QK_NORMS)


def _feed_forward(name: str, hidden: int, index: int, config: ModelConfig) -> Iterator[TensorShape]:
    number = _experts(config)
    inner = fields.count(config, "intermediate_size")
    if not number or not _has_experts(config, index):
        return gated_mlp(name, hidden, inner)
    inner = fields.count(config, "moe_intermediate_size", default=inner)
    if shared := _first(config, "num_shared_experts", "n_shared_experts"):
        return deepseek_moe(name, hidden, number, inner, shared=shared * inner)
    return linear_moe(name, hidden, number, inner)


def _experts(config: ModelConfig) -> int:
    return _first(config, "num_local_experts", "num_experts", "n_routed_experts")


def _first(config: ModelConfig, *keys: str) -> int:
    """The first of the counts ``keys`` that config.json has; 0 without one."""
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    return fields.count(config, key, default=0, minimum=0)


def _has_experts(config: ModelConfig, index: int) -> bool:
    if config.get("is_moe_layer") is not None:
        return bool(fields.per_layer(config, "is_moe_layer", (True, False))[index])
    if config.get("num_experts") is not None and not fields.experts_by_step(config, index):
        return False
    return fields.experts_after_dense(config, index)


plugin = Generic()
