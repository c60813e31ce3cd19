"""The ERNIE 4.5 family, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxcel.family import Family, Part, Place, fields
from mlxcel.family.attention import Attention
from mlxcel.family.shapes import TensorShape, block, decoder, gated_experts, gated_mlp, linear

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind


class Ernie45(Family):
    """Full attention; biases everywhere or nowhere."""

    api_version = "1.0"
    wire_names = ("ernie4_5",)
    tied_by_default = True

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention = _attention(config)

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            mlp = self.feed_forward(f"{name}.mlp", attention.hidden, index, config)
            return block(name, attention.hidden, attention.shapes(f"{name}.self_attn"), mlp)

        return decoder(config, layer, tied=self.tied(config))

    def feed_forward(
        self, name: str, hidden: int, index: int, config: ModelConfig
    ) -> Iterator[TensorShape]:
        """What follows attention in layer ``index``."""
        inner = fields.count(config, "intermediate_size")
        return gated_mlp(name, hidden, inner, bias=fields.flag(config, "use_bias"))

    def ignored(self, config: ModelConfig) -> tuple[str, ...]:
        return fields.rope_scaling(config)

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        return (_attention(config).cache(),) * config.num_layers


class Ernie45Moe(Ernie45):
    """Experts in a range of layers, and one MLP that every token passes."""

    wire_names = ("ernie4_5_moe",)

    def place(self, name: str, config: ModelConfig) -> Place:
        """Neither the draft layers nor the bias of the router are read by mlx-lm."""
        if "mtp_" in name or name.endswith("e_score_correction_bias"):
            return Place(Part.UNUSED)
        return super().place(name, config)

    def feed_forward(
        self, name: str, hidden: int, index: int, config: ModelConfig
    ) -> Iterator[TensorShape]:
        if not has_experts(config, index):
            yield from super().feed_forward(name, hidden, index, config)
            return
        bias = fields.flag(config, "use_bias")
        number = fields.count(config, "moe_num_experts")
        inner = fields.count(config, "moe_intermediate_size", default=0, minimum=0)
        inner = inner or fields.count(config, "intermediate_size")
        shared = fields.count(config, "moe_num_shared_experts", default=0, minimum=0)
        yield from linear(f"{name}.gate", number, hidden)
        yield from gated_experts(f"{name}.switch_mlp", number, hidden, inner, bias=bias)
        if shared:
            yield from gated_mlp(f"{name}.shared_experts", hidden, shared * inner, bias=bias)


def has_experts(config: ModelConfig, index: int) -> bool:
    """Whether layer ``index`` has experts. First and last one may be lists, one per modality."""
    first = config.get("moe_layer_start_index", 0)
    last = config.get("moe_layer_end_index", config.num_layers - 1)
    first = min(first) if isinstance(first, list) and first else first
    last = max(last) if isinstance(last, list) and last else last
    fields.checked(config, "moe_layer_start_index", first, minimum=0)
    fields.checked(config, "moe_layer_end_index", last, minimum=0)
    every = fields.count(config, "moe_layer_interval", default=1)
    return (index + 1) % every == 0 and first <= index <= last


def _attention(config: ModelConfig) -> Attention:
    bias = fields.flag(config, "use_bias")
    return Attention.of(config, bias=bias, out_bias=bias)


ernie4_5, ernie4_5_moe = Ernie45(), Ernie45Moe()
