"""Layers of a gpt-oss, whose experts come packed or plain."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxcel.family.transformer import Mask, TransformerStage


class GptOssStage(TransformerStage):
    """The shared base, with sliding layers."""

    @classmethod
    def sanitize(cls, model: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """mlx-lm's own, which knows packed experts only, after plain ones have their names."""
        renamed: dict[str, mx.array] = {}
        for name, value in weights.items():
            if name.endswith(".experts.gate_up_proj"):  # [expert, inputs, gate and up in turn]
                module = name.removesuffix(".gate_up_proj")
                rows = value.swapaxes(1, 2)
                renamed[f"{module}.gate_proj.weight"] = mx.contiguous(rows[:, ::2])
                renamed[f"{module}.up_proj.weight"] = mx.contiguous(rows[:, 1::2])
            elif name.endswith(".experts.down_proj"):
                renamed[f"{name}.weight"] = value.swapaxes(1, 2)
            elif name.endswith(".experts.gate_up_proj_bias"):
                module = name.removesuffix(".gate_up_proj_bias")
                renamed[f"{module}.gate_proj.bias"] = mx.contiguous(value[:, ::2])
                renamed[f"{module}.up_proj.bias"] = mx.contiguous(value[:, 1::2])
            elif name.endswith(".experts.down_proj_bias"):
                renamed[f"{name.removesuffix('_bias')}.bias"] = value
            else:
                renamed[name] = value
        return super().sanitize(model, renamed)

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        if self.inner.layer_types[index] == "sliding_attention":
            return Mask("sliding", self.inner.window_size)
        return Mask("full")
