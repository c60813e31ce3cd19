"""The Llama 4 family: the text tower of Scout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxcel.family import Family

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.transformer import TransformerStage


class Llama4(Family):
    """Three layers of chunked attention to one of full, experts in some or all layers."""

    api_version = "1.0"
    wire_names = ("llama4",)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_llama4.stage import Llama4Stage

        return Llama4Stage

    def tied(self, config: ModelConfig) -> bool:
        """Never: mlx-lm's model always has a head of its own."""
        return False


plugin = Llama4()
