"""Layers of a Kimi K3.

The input of a layer is a mix of the residual sums so far, one per block of layers. So what
crosses a boundary is the running sum and every block that is complete.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.kimi_k3 import ResidualBlocks, _attn_res_mix

from mlxcel.family.transformer import Cache, Mask, Payload, TransformerStage

BLOCKS = "blocks"
"""What crosses beside ``h``: [blocks, rows, length, hidden]."""


class KimiK3Stage(TransformerStage):
    """The shared base, with recurrent layers and residual blocks."""

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        return Mask("ssm") if layer.is_linear else Mask("array")

    def run(self, payload: Payload, caches: list[Cache | None]) -> Payload:
        h, blocks = payload["h"], self._blocks(payload)
        masks = self.make_masks(h, caches)
        for layer, mask, cache in zip(self.layers, self.masks, caches, strict=True):
            self.begin(h)
            h, blocks = layer(h, masks[mask], cache, blocks)
        if blocks is None:
            return {"h": h}
        if self.last:
            return {"h": self._mixed(h, blocks)}
        assert blocks.raw is not None, "the first layer begins a block"
        return {"h": h, BLOCKS: blocks.raw}

    def head_parts(self) -> set[str]:
        return {*super().head_parts(), "output_attn_res_proj", "output_attn_res_norm"}

    def _blocks(self, payload: Payload) -> ResidualBlocks | None:
        """The blocks that came along, with their norms as the whole model works them out."""
        if not self.inner.use_attn_res:
            return None
        blocks = ResidualBlocks(self.inner.args.rms_norm_eps)
        for block in payload.get(BLOCKS, ()):
            blocks.append(block)
        return blocks

    def _mixed(self, h: mx.array, blocks: ResidualBlocks) -> mx.array:
        """What the final norm reads: the last mix."""
        norm, projection = self.inner.output_attn_res_norm, self.inner.output_attn_res_proj
        weights = norm.weight.astype(mx.float32) * projection.weight.reshape(-1)
        return _attn_res_mix(blocks, h, weights, self.inner.args.rms_norm_eps)
