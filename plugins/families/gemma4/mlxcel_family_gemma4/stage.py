"""Layers of a Gemma 4 text tower.

Two things beside the hidden states: every layer reads its own slice of the *per-layer
inputs*, which the first stage makes from the token ids and which therefore cross the
boundary; and the last layers read keys and values of an earlier one, the *source*. Where a
stage has such layers without their source, new keys and values cross the boundary too, and
the stage puts them into a cache of its own that mirrors the source's.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import logit_softcap

from mlxcel.family.transformer import Cache, Mask, Payload, TransformerStage
from mlxcel_family_gemma4.tap import Tap


class Gemma4Stage(TransformerStage):
    """The shared base, with per-layer inputs under ``per_layer`` [rows, length, layers, dim].

    New keys and values of source i are ``keys_i`` and ``values_i`` [rows, heads, length, dim].

    Attributes:
        mirrors: The sources before this stage that its layers read.
        passed_on: The sources in or before this stage that layers behind it read.
    """

    def __init__(self, model: nn.Module, start: int, stop: int) -> None:
        super().__init__(model, start, stop)
        source = self.inner.previous_kvs
        self.mirrors = sorted({s for s in source[start:stop] if s < start})
        self.passed_on = sorted({s for s in source[stop:] if s < stop})

    def find_caches(self, model: nn.Module) -> list[Cache | None]:
        own = super().find_caches(model)
        shared = self.num_layers - len(own)
        self._every_cache = own + [None] * shared
        return self._every_cache

    def make_caches(self) -> list[Cache | None]:
        """One entry per own layer, then the mirrors."""
        mirrors = [copy.deepcopy(self._every_cache[source]) for source in self.mirrors]
        return [*super().make_caches(), *mirrors]

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
        # The second table may be shorter than the vocabulary, and MLX would read past its end.
        known = mx.where(tokens < inner.config.vocab_size_per_layer_input, tokens, 0)
        raw = inner._get_per_layer_inputs(known, table)
        return {"h": h, "per_layer": inner._project_per_layer_inputs(h, raw)}

    def run(self, payload: Payload, caches: list[Cache | None]) -> Payload:
        h, per_layer, count = payload["h"], payload.get("per_layer"), len(self.layers)
        own, mirrors = caches[:count], dict(zip(self.mirrors, caches[count:], strict=True))
        sources = self.inner.previous_kvs[self.start : self.stop]
        read = [mirrors.get(source, cache) for source, cache in zip(sources, own, strict=True)]
        masks = self.make_masks(h, read)
        seen: dict[int, tuple[Any, Any]] = {}  # layer to (keys and values, offset)
        for source, mirror in mirrors.items():
            offset = mx.array(mirror.offset)
            seen[source] = (mirror.update_and_fetch(*_news(payload, source)), offset)
        news = {s: _news(payload, s) for s in self.passed_on if s < self.start}
        for i, (layer, mask, cache) in enumerate(zip(self.layers, self.masks, own, strict=True)):
            self.begin(h)
            index, source = self.start + i, sources[i]
            shared, before = seen[source] if source != index else (None, None)
            own_input = None if per_layer is None else per_layer[:, :, i, :]
            tap = Tap(cache)
            h, kv, offset = layer(
                h,
                masks[mask],
                tap if index in self.passed_on else cache,
                per_layer_input=own_input,
                shared_kv=shared,
                offset=before,
            )
            seen[index] = (kv, offset)
            if index in self.passed_on:
                news[index] = tap.new
        out = {"h": h}
        for source, (keys, values) in news.items():
            out |= {f"keys_{source}": keys, f"values_{source}": values}
        if per_layer is not None and not self.last:
            out["per_layer"] = per_layer[:, :, count:, :]
        return out

    def logits(self, h: mx.array) -> mx.array:
        out = super().logits(h)
        cap = self.text.final_logit_softcapping
        return out if cap is None else logit_softcap(cap, out)


def _news(payload: Payload, source: int) -> tuple[mx.array, mx.array]:
    """What ``source`` puts into its cache in this step."""
    return payload[f"keys_{source}"], payload[f"values_{source}"]
