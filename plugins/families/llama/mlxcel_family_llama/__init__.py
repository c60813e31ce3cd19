"""The Llama family: Llama 2, 3, 3.1 to 3.3, and what mlx-lm runs with the same class."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import attrs

from mlxcel.family import Family

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.transformer import TransformerStage


class Llama(Family):
    """Dense decoder layers, full or sliding attention."""

    api_version = "1.0"
    wire_names = ("llama",)
    model_types = ("mistral", "iquestcoder", "xverse")
    tied_by_default = True

    def settle(self, config: ModelConfig, tensors: Collection[str]) -> ModelConfig:
        """Without a head in the checkpoint the embedding is the head, whatever config.json says."""
        if any(name.startswith("lm_head.") for name in tensors):
            return config
        raw = {**config.raw, "tie_word_embeddings": True}
        return attrs.evolve(config, raw=raw, text=raw)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_llama.stage import LlamaStage

        return LlamaStage


plugin = Llama()
