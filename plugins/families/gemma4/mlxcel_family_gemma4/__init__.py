"""The Gemma 4 family: the text tower of E2B, E4B, 26B-A4B and 31B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family, LayerAdjacencyGroup, Part, Place
from mlxcel.family.shapes import TensorShape
from mlxcel_family_gemma4.layers import (
    layer_caches,
    layer_types,
    model_shapes,
    shared_layers,
    sources,
)

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage


class Gemma4(Family):
    """Global and sliding layers; per-layer inputs; a tail of layers that share K and V."""

    api_version = "1.0"
    wire_names = ("gemma4", "gemma4_vlm")
    model_types = ("gemma4_text", "gemma4_unified")
    tied_by_default = True

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_gemma4.stage import Gemma4Stage

        return Gemma4Stage

    def adjacency(self, config: ModelConfig) -> tuple[LayerAdjacencyGroup, ...]:
        """Each KV-shared layer stays with the one whose keys and values it reads, or mirrors it."""
        types = layer_types(config)
        return tuple(
            LayerAdjacencyGroup(
                source,
                layer + 1,
                f"layer {layer} reads the keys and values of layer {source} ({types[layer]})",
                mirrorable=True,
            )
            for layer, source in sources(config).items()
        )

    def place(self, name: str, config: ModelConfig) -> Place:
        if "_per_layer." in name or "per_layer_model_projection" in name:
            return Place(Part.EMBEDDING)
        if "per_layer_projection_norm" in name:
            return Place(Part.EMBEDDING)
        place = super().place(name, config)
        own = config.num_layers - shared_layers(config)
        if place.layer is not None and place.layer >= own and _is_kv(name):
            return Place(Part.UNUSED)  # hub checkpoints carry K and V there that nobody reads
        return place

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        return model_shapes(config, tied=self.tied(config))

    def caches(self, config: ModelConfig) -> tuple[CacheKind | None, ...]:
        return layer_caches(config)


def _is_kv(name: str) -> bool:
    return any(part in name for part in (".self_attn.k_proj", ".self_attn.v_proj", ".k_norm"))


plugin = Gemma4()
