"""The toy family: what mlxcel asks while it plans. Nothing here imports MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxcel.family import Family

if TYPE_CHECKING:
    from mlxcel.family.transformer import TransformerStage


class ToyFamily(Family):
    """A plain decoder; the defaults of :class:`Family` place all of its tensors."""

    api_version = "1.0"
    wire_names = ("toy",)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_toy.stage import ToyStage

        return ToyStage


plugin = ToyFamily()
