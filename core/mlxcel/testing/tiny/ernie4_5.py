"""Tiny ERNIE 4.5 checkpoints: biases everywhere; one with experts from the second layer on."""

from __future__ import annotations

from mlxcel.testing.tiny.common import DENSE, not_numbers, one_per_expert
from mlxcel.testing.tiny.recipe import Config, Recipe, Weights

_BASE = {**DENSE, "rope_theta": 500000.0, "tie_word_embeddings": True}

_UNREAD = {
    "model.mtp_block.0.input_layernorm.weight": (64,),
    "model.mtp_emb_norm.0.weight": (64,),
    "model.layers.2.mlp.moe_statics.e_score_correction_bias": (1, 4),
}


def _to_hub(weights: Weights, config: Config) -> Weights:
    """Experts one by one, draft layers and a router's bias that mlx-lm does not read."""
    unread = not_numbers(_UNREAD, weights["model.embed_tokens.weight"])
    return one_per_expert(weights) | unread


RECIPES = (
    Recipe(
        "ernie4_5",
        {
            **_BASE,
            "model_type": "ernie4_5",
            "architectures": ["Ernie4_5ForCausalLM"],
            "use_bias": True,
        },
        seed="ernie4_5:0",
    ),
    Recipe(
        "ernie4_5_moe",
        {
            **_BASE,
            "model_type": "ernie4_5_moe",
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "num_hidden_layers": 4,
            "use_bias": False,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "moe_num_shared_experts": 1,
        },
        _to_hub,
        seed="ernie4_5_moe:0",
    ),
)
