"""Tiny Qwen 2 checkpoints: biases on queries, keys and values; one with experts."""

from __future__ import annotations

from mlxcel.testing.tiny.common import DENSE, one_per_expert
from mlxcel.testing.tiny.recipe import Config, Recipe, Weights

_BASE = {
    **{key: value for key, value in DENSE.items() if key != "head_dim"},
    "hidden_size": 128,
    "rope_theta": 1e6,
}


def _to_hub(weights: Weights, config: Config) -> Weights:
    return one_per_expert(weights)


RECIPES = (
    Recipe(
        "qwen2",
        {
            **_BASE,
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "tie_word_embeddings": True,
        },
        seed="qwen2:0",
    ),
    Recipe(
        "qwen2_moe",
        {
            **_BASE,
            "model_type": "qwen2_moe",
            "architectures": ["Qwen2MoeForCausalLM"],
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
        },
        _to_hub,
        seed="qwen2_moe:0",
    ),
)
