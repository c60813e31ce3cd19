"""Tiny Kimi K3 checkpoints: delta and latent attention, latent experts; residual blocks or none."""

from __future__ import annotations

from typing import Any

from mlxcel.testing.tiny.common import TOKENS, latents_in_one, not_numbers, one_per_expert
from mlxcel.testing.tiny.recipe import Config, Recipe, Weights

_TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": TOKENS["vocab_size"],
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "hidden_act": "situ",
    "attn_res_block_size": 3,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 64,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

_CONFIG: dict[str, Any] = {
    **TOKENS,
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "text_config": _TEXT,
}

_TOWER = {
    "vision_tower.encoder.blocks.0.norm0.weight": (32,),
    "mm_projector.pre_norm.weight": (32,),
}

_EXPERTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def _to_hub(weights: Weights, config: Config) -> Weights:
    """Experts one by one, queries, keys and values apart, what weighs the residuals renamed."""
    hub: Weights = {}
    for name, value in latents_in_one(one_per_expert(weights, names=_EXPERTS)).items():
        layer, _, leaf = name.partition(".self_attn.")
        if leaf == "qkv_proj.weight":
            parts = value.reshape(3, -1, value.shape[1])
            hub |= {f"{layer}.self_attn.{p}_proj.weight": parts[i] for i, p in enumerate("qkv")}
        elif leaf == "qkv_conv.conv.weight":  # [3 channels, width, 1]
            parts = value.moveaxis(1, 2).reshape(3, -1, 1, value.shape[1])
            hub |= {f"{layer}.self_attn.{p}_conv1d.weight": parts[i] for i, p in enumerate("qkv")}
        elif name.endswith(("_res_proj.weight", "_res_norm.weight")):
            hub[name.replace("_res_", "_res.").replace(".weight", "_weight")] = value
        else:
            hub[_moe_name(name, weights)] = value
    table = weights["language_model.model.embed_tokens.weight"]
    return hub | not_numbers(_TOWER, table)


def _moe_name(name: str, weights: Weights) -> str:
    """Layers with experts have them under ``block_sparse_moe``."""
    layer, found, rest = name.partition(".mlp.")
    if not found or f"{layer}.mlp.gate.weight" not in weights:
        return name
    if rest == "e_score_correction_bias":
        rest = f"gate.{rest}"
    return f"{layer}.block_sparse_moe.{rest}"


RECIPES = (
    Recipe("kimi_k3", _CONFIG, _to_hub, seed="kimi_k3:0"),
    Recipe(
        "kimi_k3_plain",
        {**_CONFIG, "text_config": {**_TEXT, "attn_res_block_size": None}},
        _to_hub,
        seed="kimi_k3_plain:0",
    ),
)
