"""Layers of a GLM with sparse attention."""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from mlxcel.family.transformer import Cache, Mask, TransformerStage


@attrs.frozen
class LatentMask(Mask):
    """As an array, from the cache of the latents; the other one is the indexer's."""

    def make(self, h: mx.array, cache: Cache) -> Any:
        return Mask("array").make(h, cache[0])


class GlmMoeDsaStage(TransformerStage):
    """The shared base, with two caches in each layer."""

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        return LatentMask()
