"""Tiny Qwen 3 checkpoints: norms on queries and keys; one with experts in all layers but one."""

from __future__ import annotations

from mlxcel.testing.tiny.common import DENSE, one_per_expert
from mlxcel.testing.tiny.recipe import Config, Recipe, Weights

_BASE = {**DENSE, "rope_theta": 1e6}


def _to_hub(weights: Weights, config: Config) -> Weights:
    return one_per_expert(weights)


RECIPES = (
    Recipe(
        "qwen3",
        {**_BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        seed="qwen3:1",
    ),
    Recipe(
        "qwen3_moe",
        {
            **_BASE,
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
        _to_hub,
        seed="qwen3_moe:5",
    ),
)
