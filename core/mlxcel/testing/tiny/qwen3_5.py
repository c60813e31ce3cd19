"""Tiny Qwen 3.5 checkpoints: recurrent layers, norms stored without their 1, draft layers."""

from __future__ import annotations

from mlxcel.testing.tiny.recipe import Config, Recipe, Weights
from mlxcel.testing.tiny.tokenizer import BOS, EOS, PAD, VOCAB

_TEXT = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
}

_CONFIG = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "vocab_size": VOCAB,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
    "text_config": _TEXT,
}

_MOE = {
    **_CONFIG,
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        **_TEXT,
        "model_type": "qwen3_5_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
        "norm_topk_prob": True,
    },
}

_VISION = {"model_type": "qwen3_5", "hidden_size": 32, "depth": 1}

_NORMS_WITHOUT_ONE = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")

_DRAFT = {
    "mtp.fc.weight": (64, 128),
    "mtp.norm.weight": (64,),
    "mtp.pre_fc_norm_hidden.weight": (64,),
    "mtp.layers.0.input_layernorm.weight": (64,),
    "mtp.layers.0.self_attn.k_proj.weight": (64, 64),
}

_TOWER = {
    "model.visual.patch_embed.proj.weight": (32, 3, 2, 4, 4),
    "model.visual.blocks.0.attn.qkv.weight": (96, 32),
    "model.visual.blocks.0.norm1.weight": (32,),
    "model.visual.merger.norm.weight": (32,),
}


def _to_hub(weights: Weights, config: Config) -> Weights:
    """Norms less 1, convolutions as [channels, 1, width], and draft layers that are no numbers."""
    hub: Weights = {}
    for name, value in weights.items():
        name = name.removeprefix("language_model.")
        if name.endswith("conv1d.weight"):
            value = value.moveaxis(1, 2)
        elif name.endswith(_NORMS_WITHOUT_ONE):
            value = value - 1
        hub[name.replace("model.", "model.language_model.", 1)] = value
    return hub | _not_numbers(_DRAFT, weights)


def _with_vision_tower(weights: Weights, config: Config) -> Weights:
    return _to_hub(weights, config) | _not_numbers(_TOWER, weights)


def _moe_to_hub(weights: Weights, config: Config) -> Weights:
    """The experts' gate and up projection in one tensor."""
    import mlx.core as mx

    hub: Weights = {}
    for name, value in weights.items():
        module, found, rest = name.partition(".switch_mlp.")
        if not found:
            hub[name] = value
        elif rest == "gate_proj.weight":
            both = [value, weights[f"{module}.switch_mlp.up_proj.weight"]]
            hub[f"{module}.experts.gate_up_proj"] = mx.concatenate(both, axis=-2)
        elif rest == "down_proj.weight":
            hub[f"{module}.experts.down_proj"] = value
    return _to_hub(weights=hub, config=config)


def _moe_with_vision_tower(weights: Weights, config: Config) -> Weights:
    return _moe_to_hub(weights, config) | _not_numbers(_TOWER, weights)


def _not_numbers(shapes: dict[str, tuple[int, ...]], weights: Weights) -> Weights:
    """Tensors that show in the logits if anything reads them."""
    import mlx.core as mx

    dtype = weights["language_model.model.embed_tokens.weight"].dtype
    return {name: mx.full(shape, float("nan"), dtype) for name, shape in shapes.items()}


RECIPES = (
    Recipe("qwen3_5", _CONFIG, _to_hub, seed="qwen3_5:0"),
    Recipe(
        "qwen3_5_vlm", {**_CONFIG, "vision_config": _VISION}, _with_vision_tower, seed="qwen3_5:0"
    ),
    Recipe("qwen3_5_moe", _MOE, _moe_to_hub, seed="qwen3_5_moe:0"),
    Recipe(
        "qwen3_5_moe_vlm",
        {**_MOE, "vision_config": _VISION},
        _moe_with_vision_tower,
        seed="qwen3_5_moe:0",
    ),
)
