"""A tiny Qwen3-Next: recurrent layers, experts one by one, draft layers that nobody reads."""

from __future__ import annotations

from mlxcel.testing.tiny.common import (
    DENSE,
    channels_first,
    norms_less_one,
    not_numbers,
    one_per_expert,
)
from mlxcel.testing.tiny.recipe import Config, Recipe, Weights

_CONFIG = {
    **DENSE,
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "norm_topk_prob": True,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.25,
}

_DRAFT = {"mtp.fc.weight": (64, 128), "mtp.layers.0.input_layernorm.weight": (64,)}


def _to_hub(weights: Weights, config: Config) -> Weights:
    hub = one_per_expert(channels_first(norms_less_one(weights)))
    return hub | not_numbers(_DRAFT, weights["model.embed_tokens.weight"])


RECIPES = (Recipe("qwen3_next", _CONFIG, _to_hub, seed="qwen3_next:0"),)
