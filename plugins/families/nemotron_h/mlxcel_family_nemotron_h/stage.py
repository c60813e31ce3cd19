"""Layers of a Nemotron-H: each is one mechanism, and only two of the four keep anything."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.nemotron_h import NemotronHMamba2Mixer
from mlx_lm.models.ssm import ssm_update

from mlxcel.checkpoint.config import ModelConfig
from mlxcel.family.transformer import Cache, Mask, Payload, TransformerStage
from mlxcel_family_nemotron_h import ATTENTION, MAMBA


class PaddedMixer(NemotronHMamba2Mixer):
    """mlx-lm's Mamba-2 block, which also takes rows that are padded on the right.

    mlx-lm's own does not tell the scan how long each row is, so that it loses what a short row
    has put into its state.
    """

    def _ssm(
        self,
        hidden_states: mx.array,
        B: mx.array,
        C: mx.array,
        dt: mx.array,
        cache: Cache,
        mask: mx.array | None,
    ) -> mx.array:
        """The selective scan of one step: [rows, length, inner] to the same."""
        rows, length, inner = hidden_states.shape
        groups = (rows, length, self.n_groups, self.ssm_state_size)
        assert self.time_step_limit is not None, "the arguments of the model fill it in"
        real = None if cache.lengths is None else mx.clip(cache.lengths, 0, length)
        out, cache[1] = ssm_update(
            hidden_states.reshape(rows, length, self.num_heads, self.head_dim),
            self.A_log,
            B.reshape(groups),
            C.reshape(groups),
            self.D.astype(hidden_states.dtype),
            dt,
            self.dt_bias,
            cache[1],
            self.time_step_limit,
            mask=mask,
            lengths=real,
        )
        return cast(mx.array, out.reshape(rows, length, inner))


class NemotronHStage(TransformerStage):
    """The shared base, under other names, with layers that have no cache."""

    @classmethod
    def build_model(cls, config: ModelConfig) -> nn.Module:
        model = super().build_model(config)
        for layer in model.layers:
            if layer.block_type == MAMBA:
                layer.mixer = PaddedMixer(model.args)
        return model

    def find_inner(self, text: nn.Module) -> nn.Module:
        return cast(nn.Module, text.backbone)

    def find_caches(self, model: nn.Module) -> list[Cache | None]:
        own = iter(super().find_caches(model))
        keeps = (MAMBA, ATTENTION)
        return [next(own) if layer.block_type in keeps else None for layer in model.layers]

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        kinds = {MAMBA: Mask("ssm"), ATTENTION: Mask("full")}
        return kinds.get(layer.block_type, Mask("none"))

    def embed(self, tokens: mx.array) -> Payload:
        return {"h": self.inner.embeddings(tokens)}

    def table_parts(self) -> set[str]:
        return {"embeddings"}

    def head_parts(self) -> set[str]:
        return {"norm_f", "lm_head"}

    def final_norm(self, h: mx.array) -> mx.array:
        return cast(mx.array, self.inner.norm_f(h))
