"""Tiny Gemma 3 checkpoints: sliding layers between global ones; one beside a second tower."""

from __future__ import annotations

from typing import Any

from mlxcel.testing.tiny.common import TOKENS, not_numbers
from mlxcel.testing.tiny.recipe import Config, Recipe, Weights

_TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": TOKENS["vocab_size"],
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}

_TOWER = {
    "vision_tower.vision_model.embeddings.position_embedding.weight": (4, 32),
    "multi_modal_projector.mm_input_projection_weight": (32, 64),
}


def _with_vision_tower(weights: Weights, config: Config) -> Weights:
    table = weights["language_model.model.embed_tokens.weight"]
    return weights | not_numbers(_TOWER, table)


RECIPES = (
    Recipe(
        "gemma3_text",
        {**_TEXT, **TOKENS, "architectures": ["Gemma3ForCausalLM"]},
        seed="gemma3_text:0",
        headless=True,
    ),
    Recipe(
        "gemma3",
        {
            **TOKENS,
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": _TEXT,
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 32},
        },
        _with_vision_tower,
        seed="gemma3:0",
        headless=True,
    ),
)
