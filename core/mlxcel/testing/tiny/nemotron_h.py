"""A tiny Nemotron-H: Mamba-2, attention, an MLP or experts, one per layer."""

from __future__ import annotations

from mlxcel.testing.tiny.common import TOKENS, channels_first, not_numbers, one_per_expert
from mlxcel.testing.tiny.recipe import Config, Recipe, Weights

_CONFIG = {
    **TOKENS,
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "hybrid_override_pattern": "ME-M*ME*",
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "mlp_bias": False,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_proj_bias": False,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_groups": 2,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 128,
    "n_group": 2,
    "topk_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

_DRAFT = {"mtp.layers.0.norm.weight": (64,)}


def _to_hub(weights: Weights, config: Config) -> Weights:
    hub = one_per_expert(channels_first(weights), names={"fc1": "up_proj", "fc2": "down_proj"})
    return hub | not_numbers(_DRAFT, weights["backbone.embeddings.weight"])


RECIPES = (Recipe("nemotron_h", _CONFIG, _to_hub, seed="nemotron_h:0"),)
