"""The Jamba family: Mamba, attention and experts in one model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family
from mlxcel.family.attention import Attention
from mlxcel.family.fields import count, flag, per_layer
from mlxcel.family.recurrence import Mamba1
from mlxcel.family.shapes import TensorShape, block, decoder, gated_experts, gated_mlp, linear

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage


class Jamba(Family):
    """Seven Mamba layers to one of attention, experts in every other layer."""

    api_version = "1.0"
    wire_names = ("jamba",)
    tied_by_default = True

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_jamba.stage import JambaStage

        return JambaStage

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        mixers, hidden = _mixers(config), count(config, "hidden_size")
        inner, experts = count(config, "intermediate_size"), count(config, "num_experts")
        offset = count(config, "expert_layer_offset", minimum=0)
        period = count(config, "expert_layer_period")

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            mixer, feed_forward = mixers[index], f"{name}.feed_forward"
            own = "self_attn" if isinstance(mixer, Attention) else "mamba"
            parts = [mixer.shapes(f"{name}.{own}")]
            if experts > 1 and (index + offset) % period == 0:
                parts.append(linear(f"{feed_forward}.router", experts, hidden))
                parts.append(gated_experts(f"{feed_forward}.switch_mlp", experts, hidden, inner))
            else:
                parts.append(gated_mlp(feed_forward, hidden, inner))
            return block(name, hidden, *parts, norms=("input_layernorm", "pre_ff_layernorm"))

        return decoder(config, layer, tied=self.tied(config), final_norm="final_layernorm")

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        return tuple(mixer.cache() for mixer in _mixers(config))


def _mixers(config: ModelConfig) -> list[Attention | Mamba1]:
    """What mixes the positions in each layer."""
    attention, mamba = Attention.of(config, own_head_dim=False), _mamba(config)
    if config.get("layers_block_type") is not None:
        types = per_layer(config, "layers_block_type", ("attention", "mamba"))
        return [attention if own == "attention" else mamba for own in types]
    offset = count(config, "attn_layer_offset", minimum=0)
    period = count(config, "attn_layer_period")
    return [attention if index % period == offset else mamba for index in range(config.num_layers)]


def _mamba(config: ModelConfig) -> Mamba1:
    hidden = count(config, "hidden_size")
    if config.get("mamba_dt_rank", "auto") == "auto":
        rank = -(-hidden // 16)
    else:
        rank = count(config, "mamba_dt_rank")
    return Mamba1(
        hidden,
        inner=count(config, "mamba_expand") * hidden,
        state=count(config, "mamba_d_state"),
        kernel=count(config, "mamba_d_conv"),
        rank=rank,
        bias=flag(config, "mamba_proj_bias", default=False),
        conv_bias=flag(config, "mamba_conv_bias", default=True),
    )


plugin = Jamba()
