"""Tiny Gemma 4 checkpoints: per-layer inputs, shared K/V, experts, a second tower."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxcel.testing.tiny.recipe import Config, Recipe, Weights
from mlxcel.testing.tiny.tokenizer import BOS, EOS, PAD, VOCAB

if TYPE_CHECKING:
    import mlx.core as mx

_TOKENS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}

# The small ones of the family: a tail of layers without K/V of their own, per-layer inputs.
_SMALL: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 64,
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 4,
    "intermediate_size": 64,
    "use_double_wide_mlp": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "attention_k_eq_v": False,
    "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 3
    + ["full_attention"]
    + ["sliding_attention", "full_attention"] * 2,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}

# The large ones: experts beside the dense MLP, K = V in global layers, nothing shared.
_EXPERTS = {
    **_SMALL,
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 0,
    "intermediate_size": 128,
    "use_double_wide_mlp": False,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}

_VISION = {"model_type": "gemma4_vision", "hidden_size": 32, "num_hidden_layers": 1}


def _nested(text: Config) -> dict[str, Any]:
    return {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "vocab_size": VOCAB,
        **_TOKENS,
        "text_config": text,
    }


def _text_to_hub(weights: Weights, config: Config) -> Weights:
    """Fused experts, and unused K/V of nonsense shape in the layers that share another's."""
    import mlx.core as mx

    text = config.get("text_config", config)
    layers = text["num_hidden_layers"]
    tower = "language_model." if "text_config" in config else ""
    dtype = _dtype_of(weights)
    weights = dict(weights)
    for layer in range(layers):
        prefix = f"{tower}model.layers.{layer}"
        if layer >= layers - text["num_kv_shared_layers"]:
            weights[f"{prefix}.self_attn.k_proj.weight"] = mx.zeros((2, 2), dtype)
            weights[f"{prefix}.self_attn.v_proj.weight"] = mx.zeros((2, 2), dtype)
            weights[f"{prefix}.self_attn.k_norm.weight"] = mx.zeros((2,), dtype)
        experts = f"{prefix}.experts"
        if f"{experts}.switch_glu.gate_proj.weight" in weights:
            gate = weights.pop(f"{experts}.switch_glu.gate_proj.weight")
            up = weights.pop(f"{experts}.switch_glu.up_proj.weight")
            weights[f"{experts}.gate_up_proj"] = mx.concatenate([gate, up], axis=-2)
            weights[f"{experts}.down_proj"] = weights.pop(f"{experts}.switch_glu.down_proj.weight")
    return weights


def _dtype_of(weights: Weights) -> mx.Dtype:
    return next(iter(weights.values())).dtype


def _nested_to_hub(weights: Weights, config: Config) -> Weights:
    ours, hubs = "language_model.model.", "model.language_model."
    return {
        hubs + name.removeprefix(ours): value
        for name, value in _text_to_hub(weights, config).items()
    }


def _with_vision_tower(weights: Weights, config: Config) -> Weights:
    """Vision tensors that are not numbers: whatever reads them shows it in its logits."""
    import mlx.core as mx

    layer = "model.vision_tower.encoder.layers.0"
    shapes = {
        "model.vision_tower.patch_embedder.input_proj.weight": (32, 48),
        f"{layer}.self_attn.q_proj.linear.weight": (32, 32),
        f"{layer}.self_attn.k_proj.linear.weight": (32, 32),
        f"{layer}.input_layernorm.weight": (32,),
        "model.embed_vision.embedding_projection.weight": (64, 32),
    }
    nothing = {
        name: mx.full(shape, float("nan"), _dtype_of(weights)) for name, shape in shapes.items()
    }
    return _nested_to_hub(weights, config) | nothing


RECIPES = (
    Recipe("gemma4", _nested(_SMALL), _nested_to_hub, seed="gemma4:1"),
    Recipe(
        "gemma4_text",
        {**_SMALL, **_TOKENS, "architectures": ["Gemma4ForCausalLM"]},
        _text_to_hub,
        seed="gemma4_text:1",
    ),
    Recipe("gemma4_moe", _nested(_EXPERTS), _nested_to_hub, seed="gemma4_moe:29"),
    Recipe(
        "gemma4_vlm",
        {**_nested(_SMALL), "vision_config": _VISION},
        _with_vision_tower,
        seed="gemma4:1",
    ),
)
