"""Tiny Llama 4 checkpoints: chunked and full attention, fused experts, a second tower."""

from __future__ import annotations

from typing import Any

from mlxcel.testing.tiny.recipe import Config, Recipe, Weights
from mlxcel.testing.tiny.tokenizer import BOS, EOS, PAD, VOCAB

_TEXT: dict[str, Any] = {
    "model_type": "llama4_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 64,
    "intermediate_size_mlp": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "attention_chunk_size": 8,
    "use_qk_norm": True,
    "attn_temperature_tuning": 4,
    "floor_scale": 4,
    "attn_scale": 0.1,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

_CONFIG: dict[str, Any] = {
    "model_type": "llama4",
    "architectures": ["Llama4ForConditionalGeneration"],
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "text_config": _TEXT,
}

_VISION = {"model_type": "llama4_vision_model", "hidden_size": 32, "num_hidden_layers": 1}

_TOWER = {
    "multi_modal_projector.linear_1.weight": (64, 32),
    "vision_model.class_embedding": (32,),
    "vision_model.patch_embedding.linear.weight": (32, 48),
    "vision_model.layernorm_pre.weight": (32,),
    "vision_model.model.layers.0.self_attn.q_proj.weight": (32, 32),
    "vision_model.model.layers.0.input_layernorm.weight": (32,),
}


def _to_hub(weights: Weights, config: Config) -> Weights:
    """Experts as [expert, inputs, outputs], gate and up in one."""
    import mlx.core as mx

    hub: Weights = {}
    for name, value in weights.items():
        module = name.rpartition(".experts.")[0] + ".experts"
        if name.endswith(".experts.gate_proj.weight"):
            both = mx.concatenate([value, weights[f"{module}.up_proj.weight"]], axis=1)
            hub[f"{module}.gate_up_proj"] = both.swapaxes(1, 2)
        elif name.endswith(".experts.down_proj.weight"):
            hub[f"{module}.down_proj"] = value.swapaxes(1, 2)
        elif not name.endswith(".experts.up_proj.weight"):
            hub[name] = value
    return hub


def _with_vision_tower(weights: Weights, config: Config) -> Weights:
    """Vision tensors that are not numbers: whatever reads them shows it in its logits."""
    import mlx.core as mx

    dtype = weights["language_model.model.embed_tokens.weight"].dtype
    nothing = {name: mx.full(shape, float("nan"), dtype) for name, shape in _TOWER.items()}
    return _to_hub(weights, config) | nothing


RECIPES = (
    Recipe("llama4", _CONFIG, _to_hub, seed="llama4:0"),
    Recipe(
        "llama4_vlm", {**_CONFIG, "vision_config": _VISION}, _with_vision_tower, seed="llama4:0"
    ),
)
