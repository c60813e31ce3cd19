"""Tiny configs of mlx-lm's architectures, made from the fields that their classes declare.

A field gets the size of :data:`SIZES` under its name, unless its architecture says otherwise in
:data:`OWN`; else its own default; else a small value of its type.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from mlxcel.testing.tiny.common import TOKENS
from mlxcel.testing.tiny.tokenizer import VOCAB

LAYERS = 6
FULL, SLIDING = "full_attention", "sliding_attention"

# heads * head_dim is not hidden_size, so that neither passes for the other
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "post_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "sliding_window": 8,
    "partial_rotary_factor": 0.5,
    # as GPT-2 and its successors call the same
    "n_embd": 64,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "n_positions": 512,
    "n_ctx": 512,
    "rotary_dim": 16,
    "d_model": 64,
    "hidden_dim": 64,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "expert_ffn_hidden_size": 64,
    "ffn_hidden_size": 128,
    "share_expert_dim": 64,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_dense_layers": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    # latent attention
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": 8,
    # recurrence
    "conv_kernel": 4,
    "state_size": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "time_step_rank": 4,
    "time_step_limit": [0.001, 100.0],
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}

_HALF = [SLIDING, FULL] * (LAYERS // 2)
_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_YARN: Mapping[str, Any] = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}

OWN: Mapping[str, Mapping[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": _HALF},
    "baichuan_m1": {"sliding_window_layers": [0, 2, 4], "conv_window": 2},
    "cohere2": {"head_dim": 16},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": _YARN, "topk_method": "greedy"},
    "exaone": {"head_dim": 16},
    "exaone_moe": {"layer_types": _HALF, "is_moe_layer": [False] + [True] * (LAYERS - 1)},
    "gemma3n": {
        "layer_types": _HALF,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "activation_sparsity_pattern": [0.5, 0.5] + [0.0] * (LAYERS - 2),
        "hidden_size_per_layer_input": 32,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_active_idx": 0,
        "laurel_rank": 16,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
    },
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * (LAYERS // 2),
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "hunyuan": {
        "moe_topk": [2] * LAYERS,
        "num_shared_expert": [1] * LAYERS,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 2.0},
    },
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 2, 4, 5],
            "full_attn_layers": [3, 6],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "head_dim": 32,
    },
    "lfm2": {
        "layer_types": ["conv", FULL] * (LAYERS // 2),
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
    },
    "lfm2_moe": {"layer_types": ["conv", FULL] * (LAYERS // 2), "conv_L_cache": 3},
    "llama4_text": {
        "intermediate_size_mlp": 128,
        "no_rope_layers": [1, 1, 1, 0, 1, 1],
        "use_qk_norm": True,
        "attention_chunk_size": 8,
    },
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_num": 2,
    },
    "longcat_flash_ngram": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_num": 2,
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 2,
        "emb_split_num": 2,
    },
    "mellum": {
        "layer_types": _HALF,
        "rope_parameters": {SLIDING: _ROPE, FULL: _ROPE},
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1] * (LAYERS // 2),
        "moe_layer_freq": [0] + [1] * (LAYERS - 1),
        "sliding_window_size": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "v_head_dim": 32,
        "n_shared_experts": None,
        "swa_rope_theta": 10000.0,
    },
    "minicpm3": {"rope_scaling": {**_YARN, "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}},
    "minimax_m3_vl": {
        "moe_layer_freq": [0] + [1] * (LAYERS - 1),
        "dense_intermediate_size": 128,
        "rotary_dim": 16,
    },
    "ministral3": {
        "rope_parameters": {
            **_ROPE,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8,
        },
        "layer_types": _HALF,
    },
    "mistral4": {
        "rope_parameters": {
            **_ROPE,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8,
        },
    },
    "muse_spark": {
        "rope_parameters": _ROPE,
        "layer_rope_theta": [10000.0, 0.0] * (LAYERS // 2),
        "layer_types": _HALF,
        "final_logit_softcapping": 30.0,
        "moe_hidden_size": 64,
        "num_shared_experts": 0,
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 2.0}},
        ]
        * (LAYERS // 2)
    },
    "openelm": {
        "num_transformer_layers": LAYERS,
        "model_dim": 64,
        "ffn_dim_divisor": 32,
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [2.0] * LAYERS,
    },
    "phixtral": {"num_vocab": VOCAB, "model_dim": 64},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 16},
    "recurrent_gemma": {
        "block_types": ["recurrent", "recurrent", "attention"],
        "conv1d_width": 4,
        "attention_window_size": 8,
        "logits_soft_cap": 30.0,
    },
    "rwkv7": {
        "head_dim": 32,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "spark2_5": {
        "layer_types": _HALF,
        "rope_parameters": {SLIDING: _ROPE, FULL: _ROPE},
    },
    "step3p5": {"num_attention_groups": 2, "layer_types": _HALF},
}
"""What cannot be guessed from a field's name."""

_TEXT: Mapping[str, str] = {
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Architectures with a ``text_config`` of another one's fields."""

_BY_TYPE: Mapping[Any, Any] = {int: 4, float: 1.0, bool: False, str: "silu"}


def architectures() -> tuple[str, ...]:
    """The names of mlx-lm's model modules that are models, helpers left out."""
    spec = importlib.util.find_spec("mlx_lm")  # which imports nothing
    assert spec is not None and spec.submodule_search_locations is not None
    folders = [f"{folder}/models" for folder in spec.submodule_search_locations]
    names = (name for _, name, _ in pkgutil.iter_modules(folders))
    return tuple(sorted(name for name in names if name not in _HELPERS))


_HELPERS = frozenset(
    "activations base bitlinear_layers cache gated_delta mla pipeline rope_utils ssm "
    "switch_layers".split()
)


def tiny_config(name: str) -> dict[str, Any]:
    """A config.json for the architecture ``name``.

    Raises:
        Exception: Whatever the architecture's module raises when it is imported.
    """
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = dict(_fields(name, module.ModelArgs))
    if "text_config" in config:
        config["text_config"] = _text_config(name, module)
    return {**config, **TOKENS, "model_type": name}


def _text_config(name: str, module: Any) -> dict[str, Any]:
    if inner := _TEXT.get(name):
        return tiny_config(inner)
    for own in ("TextArgs", "TextConfig"):
        if hasattr(module, own):
            return dict(_fields(name, getattr(module, own)))
    raise ValueError("nobody knows the fields of its text_config")


def _fields(name: str, args_class: Any) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(args_class)
    own = OWN.get(name, {})
    for field in dataclasses.fields(args_class):
        if field.name == "model_type":
            yield field.name, name
        elif field.name in own:
            yield field.name, own[field.name]
        elif field.name in SIZES:
            yield field.name, SIZES[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            yield field.name, _BY_TYPE.get(hints.get(field.name))
