"""Layers of a Jamba.

Most layers keep no keys and values, but the tail of a convolution and the state of a
selective scan. All of it belongs to the layer itself, so only hidden states cross a
boundary.
"""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.jamba import JambaMambaMixer, fma

from mlxcel.checkpoint.config import ModelConfig
from mlxcel.family.in_step import Steps, alone
from mlxcel.family.transformer import Cache, Mask, TransformerStage


class PaddedMixer(JambaMambaMixer):
    """mlx-lm's Mamba block, which also takes rows that are padded on the right.

    A row's states are those after its last real token: the convolution's tail is cut where
    the row ends, and on padding the scan stands still, because there its input and the
    exponent of its decay are zero (h' = exp(Δ A) h + Δ B x, arXiv 2312.00752, section 3.2).
    """

    def __call__(self, x: mx.array, cache: Cache) -> mx.array:
        """One step: [rows, length, hidden] to the same, the states of ``cache`` moved on."""
        return cast(mx.array, alone(self.in_step(x, cache)))

    def in_step(self, x: mx.array, cache: Cache) -> Steps:
        """The same where ranks share the channels; see :mod:`mlxcel.family.in_step`."""
        rows, length, _ = x.shape
        tail, state = cache[0], cache[1]
        inner, gate = mx.split(self.in_proj(x), 2, axis=-1)
        if tail is None:
            tail = mx.zeros((rows, self.conv_kernel_size - 1, inner.shape[-1]), inner.dtype)
        seen = mx.concatenate([tail, inner], axis=1)
        inner = nn.silu(self.conv1d(seen))
        decay = -mx.exp(self.A_log)
        real = cache.make_mask(length)
        if real is not None:
            inner = mx.where(real[:, :, None], inner, 0)
            decay = mx.where(real[:, :, None, None], decay, 0)
        small = yield self.x_proj(inner)
        out, state = self._scan(inner, small, decay, state)
        cache[0], cache[1] = self._tail(seen, length, cache.lengths), state
        cache.advance(length)
        return self.out_proj(swiglu(gate, out))

    def _scan(
        self, x: mx.array, small: mx.array, decay: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """The selective scan, one position after the other as mlx-lm does it.

        Args:
            x: [rows, length, channels].
            small: What is chosen at each position: compressed time step, B and C.
            decay: [..., channels, states], below zero.
            state: [rows, channels, states]; None is zeros.
        """
        rank, size = int(self.time_step_rank), self.ssm_state_size
        step, b, c = mx.split(small, [rank, rank + size], axis=-1)
        step = nn.softplus(self.dt_proj(self.dt_layernorm(step)))
        b, c = self.b_layernorm(b), self.c_layernorm(c)
        added = mx.expand_dims(step * x, -1) * mx.expand_dims(b, -2)
        kept = mx.exp(mx.expand_dims(step, -1) * decay)
        states = []
        for position in range(x.shape[1]):
            now = added[:, position]
            state = now if state is None else fma(state, kept[:, position], now)
            states.append(state)
        assert state is not None, "a step has a position"
        out = (mx.stack(states, axis=1) @ mx.expand_dims(c, -1)).squeeze(-1)
        return out + self.D * x, state

    def _tail(self, seen: mx.array, length: int, left: mx.array | None) -> mx.array:
        """What the next convolution needs of ``seen``, where ``left`` tokens are still real."""
        kept = self.conv_kernel_size - 1
        if left is None:
            return seen[:, length:]
        columns = mx.clip(left, 0, length)[:, None] + mx.arange(kept)
        return mx.take_along_axis(seen, columns[:, :, None], axis=1)


class JambaStage(TransformerStage):
    """The shared base, with Mamba layers."""

    @classmethod
    def build_model(cls, config: ModelConfig) -> nn.Module:
        model = super().build_model(config)
        for layer in model.layers:
            if not layer.is_attn:
                layer.mamba = PaddedMixer(model.args)
        return model

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        return Mask("full") if layer.is_attn else Mask("none")

    def head_parts(self) -> set[str]:
        return {"final_layernorm", "lm_head"}

    def final_norm(self, h: mx.array) -> mx.array:
        return cast(mx.array, self.inner.final_layernorm(h))
