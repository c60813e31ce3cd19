"""Tiny Jamba checkpoints: Mamba layers, attention, experts one by one; one without experts."""

from __future__ import annotations

from typing import Any

from mlxcel.testing.tiny.recipe import Config, Recipe, Weights
from mlxcel.testing.tiny.tokenizer import BOS, EOS, PAD, VOCAB

_CONFIG: dict[str, Any] = {
    "model_type": "jamba",
    "architectures": ["JambaForCausalLM"],
    "vocab_size": VOCAB,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_offset": 2,
    "attn_layer_period": 4,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_dt_rank": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def _to_hub(weights: Weights, config: Config) -> Weights:
    """Convolutions as [channels, 1, width], and one tensor per expert."""
    hub: Weights = {}
    for name, value in weights.items():
        if name.endswith("conv1d.weight"):
            hub[name] = value.moveaxis(1, 2)
        elif ".switch_mlp." in name:
            one = name.replace(".switch_mlp.", ".experts.{}.")
            hub |= {one.format(expert): value[expert] for expert in range(value.shape[0])}
        else:
            hub[name] = value
    return hub


RECIPES = (
    Recipe("jamba", _CONFIG, _to_hub, seed="jamba:0"),
    Recipe(
        "jamba_dense",
        {
            **_CONFIG,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_dt_rank": "auto",
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
        _to_hub,
        seed="jamba_dense:0",
    ),
)
