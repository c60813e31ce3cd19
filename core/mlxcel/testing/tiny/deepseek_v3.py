"""Tiny DeepSeek V3 checkpoints: latent attention, experts one by one, both forms of a trailer."""

from __future__ import annotations

from typing import Any

from mlxcel.testing.tiny.recipe import Config, Recipe, Weights
from mlxcel.testing.tiny.tokenizer import BOS, EOS, PAD, VOCAB

_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": VOCAB,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
    },
    "tie_word_embeddings": False,
}

_SEED = "deepseek_v3:2"


def _to_hub(weights: Weights, config: Config) -> Weights:
    """One tensor per expert, keys and values of the latent in one, and a buffer nobody reads."""
    import mlx.core as mx

    hub: Weights = {}
    for name, value in weights.items():
        if ".switch_mlp." in name:
            one = name.replace(".switch_mlp.", ".experts.{}.")
            hub |= {one.format(expert): value[expert] for expert in range(value.shape[0])}
        elif name.endswith(".embed_q.weight"):
            values = weights[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([value.swapaxes(-1, -2), values], axis=1)
            hub[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif not name.endswith(".unembed_out.weight"):
            hub[name] = value
    hub["model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.ones((8,))
    return hub


def _with_trailer(weights: Weights, config: Config) -> Weights:
    """A trailer behind the last layer, not of numbers: whatever reads it shows in the logits."""
    import mlx.core as mx

    hub = _to_hub(weights, config)
    last = max(int(name.split(".")[2]) for name in hub if name.startswith("model.layers."))
    old, new = f"model.layers.{last}.", f"model.layers.{last + 1}."
    shapes = {
        new + name.removeprefix(old): value.shape
        for name, value in hub.items()
        if name.startswith(old)
    }
    table = hub["model.embed_tokens.weight"]
    shapes |= {
        f"{new}embed_tokens.weight": table.shape,
        f"{new}enorm.weight": table.shape[1:],
        f"{new}hnorm.weight": table.shape[1:],
        f"{new}eh_proj.weight": (table.shape[1], 2 * table.shape[1]),
        f"{new}shared_head.norm.weight": table.shape[1:],
        f"{new}shared_head.head.weight": table.shape,
    }
    trailer = {
        name: mx.full(shape, float("nan"), table.dtype) for name, shape in sorted(shapes.items())
    }
    return hub | trailer


RECIPES = (
    Recipe("deepseek_v3", _CONFIG, _to_hub, seed=_SEED),
    Recipe(
        "deepseek_v3_noq",
        {**_CONFIG, "q_lora_rank": None, "rope_scaling": None},
        _to_hub,
        seed="deepseek_v3_noq:0",
    ),
    Recipe(
        "deepseek_v3_mtp", {**_CONFIG, "num_nextn_predict_layers": 1}, _with_trailer, seed=_SEED
    ),
    Recipe(
        "deepseek_v3_mtp_counted",
        {**_CONFIG, "num_hidden_layers": 5, "num_nextn_predict_layers": 1},
        _with_trailer,
        seed=_SEED,
        model_config={"num_hidden_layers": 4},
    ),
)
