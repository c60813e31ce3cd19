"""Tiny GLM checkpoints: dense, with experts, with latent attention, with sparse attention."""

from __future__ import annotations

from typing import Any

from mlxcel.testing.tiny.common import DENSE, TOKENS, latents_in_one, not_numbers, one_per_expert
from mlxcel.testing.tiny.recipe import Config, Recipe, Weights

_LATENT: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def _to_hub(weights: Weights, config: Config) -> Weights:
    """Experts one by one, keys and values in one, and a draft layer behind the last one."""
    behind = f"model.layers.{config['num_hidden_layers']}"
    draft = {f"{behind}.eh_proj.weight": (64, 128), f"{behind}.enorm.weight": (64,)}
    hub = latents_in_one(one_per_expert(weights))
    return hub | not_numbers(draft, weights["model.embed_tokens.weight"])


RECIPES = (
    Recipe(
        "glm4",
        {
            **DENSE,
            "model_type": "glm4",
            "architectures": ["Glm4ForCausalLM"],
            "num_hidden_layers": 4,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
        },
        seed="glm4:0",
    ),
    Recipe(
        "glm4_moe",
        {
            **DENSE,
            "model_type": "glm4_moe",
            "architectures": ["Glm4MoeForCausalLM"],
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 128,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 1,
        },
        _to_hub,
        seed="glm4_moe:1",
    ),
    Recipe(
        "glm4_moe_lite",
        {
            **_LATENT,
            "model_type": "glm4_moe_lite",
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "rope_theta": 1e6,
            "rope_scaling": None,
            "num_nextn_predict_layers": 1,
        },
        _to_hub,
        seed="glm4_moe_lite:0",
    ),
    Recipe(
        "glm_moe_dsa",
        {
            **_LATENT,
            "model_type": "glm_moe_dsa",
            "architectures": ["GlmMoeDsaForCausalLM"],
            "index_head_dim": 64,
            "index_n_heads": 4,
            "index_topk": 8,
            "indexer_rope_interleave": True,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        },
        _to_hub,
        seed="glm_moe_dsa:0",
    ),
)
