"""A DeepSeek V3 checkpoint of a given size with random weights, for measuring memory."""

from __future__ import annotations

import math
from pathlib import Path

from mlxcel.testing.random_tensors import ITEM_BYTES, check_dtype, write_random
from mlxcel.testing.tiny.tokenizer import VOCAB

_HEADS = 8
_HEAD_DIM = 64  # of keys, values and the latent's part without positions alike
_ROPE_DIM = 32
_RANK = 128
_SHARED = 1


def random_deepseek(
    out: Path,
    *,
    megabytes: int = 400,
    layers: int = 8,
    hidden: int = 512,
    experts: int = 16,
    vocab: int = 2048,
    dtype: str = "bfloat16",
    shards: int = 4,
    seed: int = 0,
) -> Path:
    """Write a DeepSeek V3 of at least ``megabytes`` (10**6 bytes of tensors) into ``out``.

    As on the hub, each expert has tensors of its own and keys and values share one. The first
    layer is dense; the experts are as wide as the size asks for.

    Args:
        out: The checkpoint's folder, made if need be.
        layers: The number of layers, 2 or more.
        hidden: A multiple of 64.
        experts: Per layer, 4 or more.
        vocab: Rows of the embedding table; at least 288, the tokenizer's.
        dtype: ``"bfloat16"`` or ``"float32"``.
        shards: The number of files.
        seed: Of the random numbers.

    Returns:
        ``out``.
    """
    check_dtype(dtype)
    if hidden % 64 or layers < 2 or experts < 4 or vocab < VOCAB:
        raise ValueError(
            f"hidden must be a multiple of 64, layers at least 2, experts 4, vocab {VOCAB}"
        )
    narrow = _shapes(layers, hidden, experts, 0, vocab)
    fixed = sum(math.prod(shape) for shape in narrow.values())
    per_row = 3 * hidden * ((layers - 1) * (experts + _SHARED) + 1)
    rows = (megabytes * 10**6 / ITEM_BYTES[dtype] - fixed) / per_row
    width = 64 * max(1, math.ceil(rows / 64))
    return write_random(
        out,
        _shapes(layers, hidden, experts, width, vocab),
        {
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "first_k_dense_replace": 1,
            "intermediate_size": width,
            "moe_intermediate_size": width,
            "n_routed_experts": experts,
            "n_shared_experts": _SHARED,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 1.5,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _HEADS,
            "q_lora_rank": _RANK,
            "kv_lora_rank": _RANK,
            "qk_nope_head_dim": _HEAD_DIM,
            "qk_rope_head_dim": _ROPE_DIM,
            "v_head_dim": _HEAD_DIM,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        dtype=dtype,
        shards=shards,
        seed=seed,
    )


def _shapes(
    layers: int, hidden: int, experts: int, width: int, vocab: int
) -> dict[str, tuple[int, ...]]:
    """Hub names and shapes, in the order of the forward pass."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {
            f"model.layers.{layer}.input_layernorm.weight": (hidden,),
            f"{attention}.q_a_proj.weight": (_RANK, hidden),
            f"{attention}.q_a_layernorm.weight": (_RANK,),
            f"{attention}.q_b_proj.weight": (_HEADS * (_HEAD_DIM + _ROPE_DIM), _RANK),
            f"{attention}.kv_a_proj_with_mqa.weight": (_RANK + _ROPE_DIM, hidden),
            f"{attention}.kv_a_layernorm.weight": (_RANK,),
            f"{attention}.kv_b_proj.weight": (_HEADS * 2 * _HEAD_DIM, _RANK),
            f"{attention}.o_proj.weight": (hidden, _HEADS * _HEAD_DIM),
            f"model.layers.{layer}.post_attention_layernorm.weight": (hidden,),
        }
        modules = [mlp]
        if layer:
            shapes[f"{mlp}.gate.weight"] = (experts, hidden)
            shapes[f"{mlp}.gate.e_score_correction_bias"] = (experts,)
            modules = [f"{mlp}.experts.{expert}" for expert in range(experts)]
            modules.append(f"{mlp}.shared_experts")
        for module in modules:
            shapes[f"{module}.gate_proj.weight"] = (width, hidden)
            shapes[f"{module}.up_proj.weight"] = (width, hidden)
            shapes[f"{module}.down_proj.weight"] = (hidden, width)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocab, hidden)
    return shapes
