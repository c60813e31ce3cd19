"""Layers of a Gemma 4 text tower.

Two things beside the hidden states: every layer reads its own slice of the *per-layer
inputs*, which the first stage makes from the token ids and which therefore cross the
boundary; and the last layers read keys and values of an earlier one, which therefore
stays on the same stage.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import logit_softcap

from mlxcel.family.transformer import Cache, Mask, Payload, TransformerStage


class Gemma4Stage(TransformerStage):
    """The shared base, with per-layer inputs under ``per_layer`` [rows, length, layers, dim]."""

    def find_caches(self, model: nn.Module) -> list[Cache | None]:
        own = super().find_caches(model)
        shared = self.num_layers - len(own)
        return own + [None] * shared

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        if layer.layer_type == "sliding_attention":
            return Mask("sliding", self.inner.window_size)
        return Mask("full")

    def embedding_parts(self) -> set[str]:
        return {
            "embed_tokens_per_layer",
            "per_layer_model_projection",
            "per_layer_projection_norm",
        }

    def embed(self, tokens: mx.array) -> Payload:
        inner = self.inner
        table = inner.embed_tokens(tokens)
        h = table * inner.embed_scale
        if not inner.hidden_size_per_layer_input:
            return {"h": h}
        raw = inner._get_per_layer_inputs(tokens, table)
        return {"h": h, "per_layer": inner._project_per_layer_inputs(h, raw)}

    def run(self, payload: Payload, caches: list[Cache | None]) -> Payload:
        h, per_layer = payload["h"], payload.get("per_layer")
        masks = self.make_masks(h, caches)
        seen: dict[int, tuple[Any, Any]] = {}  # layer to (keys and values, offset)
        for i, (layer, mask, cache) in enumerate(zip(self.layers, self.masks, caches, strict=True)):
            self.begin(h)
            index = self.start + i
            source = self.inner.previous_kvs[index]
            shared, offset = seen[source] if source != index else (None, None)
            own_input = None if per_layer is None else per_layer[:, :, i, :]
            h, kv, offset = layer(
                h, masks[mask], cache, per_layer_input=own_input, shared_kv=shared, offset=offset
            )
            seen[index] = (kv, offset)
        if per_layer is None or self.last:
            return {"h": h}
        return {"h": h, "per_layer": per_layer[:, :, len(self.layers) :, :]}

    def logits(self, h: mx.array) -> mx.array:
        out = super().logits(h)
        cap = self.text.final_logit_softcapping
        return out if cap is None else logit_softcap(cap, out)
