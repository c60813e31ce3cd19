"""The Llama family: Llama 2, 3, 3.1 to 3.3, and what mlx-lm runs with the same class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxcel.family import Family

if TYPE_CHECKING:
    from mlxcel.family.transformer import TransformerStage


class Llama(Family):
    """Dense decoder layers, full or sliding attention."""

    api_version = "1.0"
    wire_names = ("llama",)
    model_types = ("mistral", "iquestcoder", "xverse")
    tied_by_default = True

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_llama.stage import LlamaStage

        return LlamaStage


plugin = Llama()
