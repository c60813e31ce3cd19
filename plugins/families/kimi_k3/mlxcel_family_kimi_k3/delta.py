"""Kimi's delta attention (KDA), worked out from config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from mlxcel.family import fields
from mlxcel.family.caches import StateCacheKind
from mlxcel.family.recurrence import FLOAT32_BYTES
from mlxcel.family.shapes import TensorShape, convolution, linear, norm, vector
from mlxcel.tensor.shard import column, row

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig


@attrs.frozen
class DeltaAttention:
    """Kimi's delta attention: gated delta rule with a decay per channel."""

    hidden: int
    heads: int
    head_dim: int
    kernel: int
    full_gate: bool

    @classmethod
    def of(cls, config: ModelConfig) -> DeltaAttention:
        """The delta attention of ``linear_attn_config``.

        Raises:
            CheckpointError: A size is missing.
        """
        own = _linear_config(config)
        return cls(
            fields.count(config, "hidden_size"),
            fields.count(own, "num_heads"),
            fields.count(own, "head_dim"),
            fields.count(own, "short_conv_kernel_size"),
            fields.flag(own, "use_full_rank_gate", default=False),
        )

    def shapes(self, name: str) -> Iterator[TensorShape]:
        """The projections, the convolution, and what rules the decay of the state."""
        width = self.heads * self.head_dim
        by_head = column(self.heads, what="heads")
        fused, per_head = (
            attrs.evolve(by_head, segments=(width,) * 3),
            attrs.evolve(by_head, axis=-1),
        )
        yield from linear(
            f"{name}.qkv_proj",
            3 * width,
            self.hidden,
            shard=attrs.evolve(fused, counted=("num_heads", "projection_dim")),
        )
        conv = f"{name}.qkv_conv.conv"
        yield from convolution(conv, 3 * width, self.kernel, bias=False, shard=fused)
        yield from self._low_rank(f"{name}.f")
        yield from linear(f"{name}.b_proj", self.heads, self.hidden, shard=by_head)
        if self.full_gate:
            yield from linear(f"{name}.g_proj", width, self.hidden, shard=by_head)
        else:
            yield from self._low_rank(f"{name}.g")
        yield from vector(f"{name}.A_log", self.heads, shard=per_head)
        yield from vector(f"{name}.dt_bias", width, shard=per_head)
        yield from norm(f"{name}.o_norm", self.head_dim)
        yield from linear(f"{name}.o_proj", self.hidden, width, shard=row(self.heads, what="heads"))

    def cache(self) -> StateCacheKind:
        """The tail of the convolution, and a matrix per head in float32."""
        return StateCacheKind(
            (
                ((self.kernel - 1) * 3 * self.heads * self.head_dim, None),
                (self.heads * self.head_dim * self.head_dim, FLOAT32_BYTES),
            ),
            split=True,
        )

    def _low_rank(self, name: str) -> Iterator[TensorShape]:
        yield from linear(f"{name}_a_proj", self.head_dim, self.hidden)
        width, by_head = self.heads * self.head_dim, column(self.heads, what="heads")
        yield from linear(f"{name}_b_proj", width, self.head_dim, shard=by_head)


def delta_layers(config: ModelConfig) -> frozenset[int]:
    """The layers with delta attention; config.json counts them from 1."""
    layers = _linear_config(config).require("kda_layers")
    if not isinstance(layers, list):
        raise fields.contradiction(config, f"kda_layers is {layers!r}, not a list of layers")
    return frozenset(fields.checked(config, "kda_layers", layer) - 1 for layer in layers)


def _linear_config(config: ModelConfig) -> ModelConfig:
    """The settings of the delta attention, which stand in an object of their own."""
    settings = config.require("linear_attn_config")
    if not isinstance(settings, dict):
        raise fields.contradiction(config, f"linear_attn_config is {settings!r}, not an object")
    return attrs.evolve(config, raw=settings, text=settings)
