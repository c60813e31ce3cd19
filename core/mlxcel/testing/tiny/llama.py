"""Tiny Llama checkpoints: biases, tied and untied heads, sliding layers."""

from __future__ import annotations

from mlxcel.testing.tiny.recipe import Config, Recipe, Weights
from mlxcel.testing.tiny.tokenizer import BOS, EOS, PAD, VOCAB

# heads * head_dim = intermediate = 128: what a row-parallel layer reads divides in two on a
# quantization group of 64, and in four on one of 32.
_BASE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

_SLIDING = {
    **_BASE,
    "rope_theta": 1e6,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}

_TIED_SEED = "llama_tied:10"


def _with_unused_head(weights: Weights, config: Config) -> Weights:
    """A head in the file of a tied model; it differs from the table, so using it shows."""
    return weights | {"lm_head.weight": -weights["model.embed_tokens.weight"]}


RECIPES = (
    Recipe(
        "llama",
        {
            **_BASE,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        seed="llama:8",
    ),
    Recipe("llama_sliding", _SLIDING, seed="llama_sliding:4"),
    Recipe(
        "mistral",
        {**_SLIDING, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        seed="llama_sliding:4",
    ),
    Recipe("llama_tied", {**_BASE, "tie_word_embeddings": True}, seed=_TIED_SEED),
    Recipe(
        "llama_tied_head",
        {**_BASE, "tie_word_embeddings": True},
        _with_unused_head,
        seed=_TIED_SEED,
    ),
    Recipe(
        "llama_untied_headless",
        _BASE,
        seed=_TIED_SEED,
        model_config={"tie_word_embeddings": True},
    ),
)
