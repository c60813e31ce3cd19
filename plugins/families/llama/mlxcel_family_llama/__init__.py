"""The Llama family: Llama 2, 3, 3.1 to 3.3, and what mlx-lm runs with the same class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from mlxcel.family import Family, fields
from mlxcel.family.attention import Attention
from mlxcel.family.shapes import TensorShape, block, decoder, gated_mlp

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage


class Llama(Family):
    """Dense decoder layers, full or sliding attention."""

    api_version = "1.0"
    wire_names = ("llama",)
    model_types: ClassVar[tuple[str, ...]] = ("mistral", "iquestcoder", "xverse")
    tied_by_default = True

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        attention, inner = _attention(config), fields.count(config, "intermediate_size")
        bias = fields.flag(config, "mlp_bias", default=False)

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            mlp = gated_mlp(f"{name}.mlp", attention.hidden, inner, bias=bias)
            return block(name, attention.hidden, attention.shapes(f"{name}.self_attn"), mlp)

        return decoder(config, layer, tied=self.tied(config))

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        types = fields.attention_types(config, lambda index: fields.FULL)
        return _attention(config).caches(config, types)

    def ignored(self, config: ModelConfig) -> tuple[str, ...]:
        return fields.window(config, by_layer=True)

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_llama.stage import LlamaStage

        return LlamaStage


def _attention(config: ModelConfig) -> Attention:
    bias = fields.flag(config, "attention_bias", default=False)
    return Attention.of(config, bias=bias, out_bias=bias)


plugin = Llama()
