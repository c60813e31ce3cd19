"""The Jamba family: Mamba, attention and experts in one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxcel.family import Family

if TYPE_CHECKING:
    from mlxcel.family.transformer import TransformerStage


class Jamba(Family):
    """Seven Mamba layers to one of attention, experts in every other layer."""

    api_version = "1.0"
    wire_names = ("jamba",)
    tied_by_default = True

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_jamba.stage import JambaStage

        return JambaStage


plugin = Jamba()
