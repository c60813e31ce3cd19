"""The Kimi K3 family: the text tower."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import attrs

from mlxcel.family import Family, Part, Place, fields
from mlxcel.family.attention import QUERY_HEADS, LatentAttention
from mlxcel.family.shapes import (
    TensorShape,
    block,
    decoder,
    gated_experts,
    gated_mlp,
    linear,
    norm,
    vector,
)
from mlxcel.tensor.shard import column
from mlxcel_family_kimi_k3.delta import DeltaAttention, delta_layers

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.checkpoint.headers import TensorHeader
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage

_PREFIX = "language_model."
_PRECISE = ("e_score_correction_bias", ".A_log", ".dt_bias")
_RENAMED = {"weight_packed": "weight", "weight_scale": "scales"}


class KimiK3(Family):
    """Kimi's delta attention (KDA) and latent attention; experts in a space of their own."""

    api_version = "1.0"
    wire_names = ("kimi_k3",)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_kimi_k3.stage import KimiK3Stage

        return KimiK3Stage

    def casts(self, name: str) -> bool:
        """What decides between experts and rules the decay stays as precise as it is stored."""
        return not name.endswith(_PRECISE)

    def place(self, name: str, config: ModelConfig) -> Place:
        if "mm_projector" in name:
            return Place(Part.UNUSED)
        if "output_attn_res" in name:
            return Place(Part.HEAD)
        return super().place(name, config)

    def unpacks(self, config: ModelConfig) -> tuple[str, ...]:
        return ("compressed-tensors",)

    def loaded(self, tensors: Mapping[str, TensorHeader]) -> Mapping[str, TensorHeader]:
        """The hub's packed experts under MLX's names: the same bytes."""
        loaded: dict[str, TensorHeader] = {}
        for name, header in tensors.items():
            module, _, leaf = name.rpartition(".")
            if leaf != "weight_shape":
                name = f"{module}.{_RENAMED.get(leaf, leaf)}"
                loaded[name] = attrs.evolve(header, name=name)
        return loaded

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        delta, latent = DeltaAttention.of(config), LatentAttention.of(config)
        gated = fields.flag(config, "mla_use_output_gate", default=False)
        linear_layers = delta_layers(config)
        blocks = config.get("attn_res_block_size") is not None
        hidden = latent.hidden

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            parts: list[Iterable[TensorShape]] = [_feed_forward(f"{name}.mlp", index, config)]
            if index in linear_layers:
                parts.append(delta.shapes(f"{name}.self_attn"))
            else:
                parts.append(latent.shapes(f"{name}.self_attn"))
                if gated:
                    values = latent.heads * latent.value_dim
                    shard = column(latent.heads, what=QUERY_HEADS)
                    parts.append(linear(f"{name}.self_attn.g_proj", values, hidden, shard=shard))
            if blocks:
                parts.append(_mix(f"{name}.self_attention_res", hidden))
                parts.append(_mix(f"{name}.mlp_res", hidden))
            return block(name, hidden, *parts)

        return itertools.chain(
            decoder(config, layer, tied=self.tied(config), prefix=_PREFIX),
            _mix(f"{_PREFIX}model.output_attn_res", hidden) if blocks else (),
        )

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        latent, state = LatentAttention.of(config).cache(), DeltaAttention.of(config).cache()
        linear_layers = delta_layers(config)
        return tuple(
            state if index in linear_layers else latent for index in range(config.num_layers)
        )


def _feed_forward(name: str, index: int, config: ModelConfig) -> Iterator[TensorShape]:
    hidden = fields.count(config, "hidden_size")
    number = fields.count(config, "num_experts", default=0, minimum=0)
    if not number or not fields.experts_after_dense(config, index):
        yield from gated_mlp(name, hidden, fields.count(config, "intermediate_size"))
        return
    inner = fields.count(config, "moe_intermediate_size")
    space = fields.count(config, "routed_expert_hidden_size", default=hidden)
    yield from linear(f"{name}.gate", number, hidden)
    yield from vector(f"{name}.e_score_correction_bias", number)
    apart = config.get("routed_expert_hidden_size") is not None
    yield from gated_experts(f"{name}.switch_mlp", number, space, inner, at_once=apart)
    if apart:
        yield from linear(f"{name}.routed_expert_down_proj", space, hidden)
        yield from linear(f"{name}.routed_expert_up_proj", hidden, space)
        if fields.flag(config, "latent_moe_use_norm", default=False):
            yield from norm(f"{name}.routed_expert_norm", space)
    if shared := fields.count(config, "num_shared_experts", default=0, minimum=0):
        yield from gated_mlp(f"{name}.shared_experts", hidden, shared * inner, at_once=apart)


def _mix(name: str, hidden: int) -> Iterator[TensorShape]:
    """What weighs the residual blocks; mlx-lm never packs it."""
    yield from vector(f"{name}_proj.weight", 1, hidden)
    yield from norm(f"{name}_norm", hidden)


plugin = KimiK3()
