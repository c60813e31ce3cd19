"""The Gemma 3 family: the text tower."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import attrs

from mlxcel.family import Family, fields
from mlxcel.family.attention import QK_NORMS, Attention
from mlxcel.family.shapes import PRE_NORMS, TensorShape, block, decoder, gated_mlp

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage

_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_LEFT_OUT = {"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6}
_LEFT_OUT_NESTED = {"num_attention_heads": 8, "num_key_value_heads": 4}


class Gemma3(Family):
    """Every n-th layer is global, the others are sliding; four norms in each."""

    api_version = "1.0"
    wire_names = ("gemma3",)
    model_types = ("gemma3_text",)
    tied_by_default = True

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_gemma3.stage import Gemma3Stage

        return Gemma3Stage

    def settle(self, config: ModelConfig, tensors: Collection[str]) -> ModelConfig:
        """Without a head in the checkpoint the embedding is the head, whatever config.json says."""
        tied = not any(name.endswith("lm_head.weight") for name in tensors)
        return attrs.evolve(config, text={**config.text, "tie_word_embeddings": tied})

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        nested, config = fields.nested(config), _complete(config)
        attention = Attention.of(config, norms=QK_NORMS)
        hidden, inner = attention.hidden, fields.count(config, "intermediate_size")

        def layer(name: str, index: int) -> Iterator[TensorShape]:
            mlp = gated_mlp(f"{name}.mlp", hidden, inner)
            own = attention.shapes(f"{name}.self_attn")
            return block(name, hidden, own, mlp, norms=_NORMS)

        return decoder(
            config,
            layer,
            tied=self.tied(config),
            vocab=_outer_vocab(config) if nested else None,
            prefix="language_model." if nested else "",
        )

    def caches(self, config: ModelConfig) -> tuple[CacheKind, ...]:
        config = _complete(config)
        every = fields.count(config, "sliding_window_pattern")
        types = (
            fields.SLIDING if (index + 1) % every else fields.FULL
            for index in range(config.num_layers)
        )
        return Attention.of(config).caches(config, types)


def _complete(config: ModelConfig) -> ModelConfig:
    """``config`` with what published configs leave out, because transformers has it as default."""
    left_out = _LEFT_OUT | _LEFT_OUT_NESTED if fields.nested(config) else _LEFT_OUT
    return attrs.evolve(config, text={**left_out, **config.text})


def _outer_vocab(config: ModelConfig) -> int:
    """Beside a vision tower it is the outer config's ``vocab_size`` that counts."""
    return fields.checked(config, "vocab_size", config.raw.get("vocab_size", 262208))


plugin = Gemma3()
