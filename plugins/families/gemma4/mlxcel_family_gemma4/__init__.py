"""The Gemma 4 family: the text tower of E2B, E4B, 26B-A4B and 31B."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxcel.family import Family, LayerAdjacencyGroup, Part, Place

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
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
        """Each KV-shared layer stays with the layer whose keys and values it reads."""
        types = layer_types(config)
        own = config.num_layers - shared_layers(config)
        source = {kind: index for index, kind in enumerate(types[:own])}
        return tuple(
            LayerAdjacencyGroup(
                source[types[layer]],
                layer + 1,
                f"layer {layer} reads the keys and values of layer {source[types[layer]]} "
                f"({types[layer]})",
            )
            for layer in range(own, config.num_layers)
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


def shared_layers(config: ModelConfig) -> int:
    """How many layers at the end compute no keys and values of their own."""
    return int(config.get("num_kv_shared_layers", 20))


def layer_types(config: ModelConfig) -> list[str]:
    """The attention kind of each layer; without ``layer_types`` every n-th one is global."""
    if types := config.get("layer_types"):
        return list(types)
    every = int(config.get("sliding_window_pattern", 5))
    return [
        "sliding_attention" if (index + 1) % every else "full_attention"
        for index in range(config.num_layers)
    ]


def _is_kv(name: str) -> bool:
    return any(part in name for part in (".self_attn.k_proj", ".self_attn.v_proj", ".k_norm"))


plugin = Gemma4()
