"""The Qwen 3.5 family: the text tower of its dense models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxcel.family import Family

if TYPE_CHECKING:
    from mlxcel.family.transformer import TransformerStage


class Qwen35(Family):
    """Three layers of gated delta rule to one of gated attention."""

    api_version = "1.0"
    wire_names = ("qwen3_5", "qwen3_5_vlm")
    model_types = ("qwen3_5_text",)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_qwen3_5.stage import Qwen35Stage

        return Qwen35Stage

    def casts(self, name: str) -> bool:
        """The decay of the recurrent state stays as precise as it is stored."""
        return not name.endswith(".A_log")


plugin = Qwen35()
