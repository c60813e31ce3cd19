"""A Llama checkpoint of a given size with random weights, for measuring memory and speed."""

from __future__ import annotations

import math
from pathlib import Path

from mlxcel.testing.random_tensors import ITEM_BYTES, check_dtype, write_random
from mlxcel.testing.tiny.tokenizer import VOCAB

_HEAD_DIM = 64


def random_llama(
    out: Path,
    *,
    megabytes: int = 400,
    layers: int = 8,
    hidden: int = 1024,
    vocab: int = 4096,
    tied: bool = False,
    dtype: str = "bfloat16",
    shards: int = 4,
    seed: int = 0,
) -> Path:
    """Write a Llama of at least ``megabytes`` (10**6 bytes of tensors) into the folder ``out``.

    The MLP is as wide as the size asks for.

    Args:
        out: The checkpoint's folder, made if need be.
        layers: The number of layers, all of one size.
        hidden: A multiple of 128.
        vocab: Rows of the embedding table; at least 288, the tokenizer's.
        tied: Whether the head is the table.
        dtype: ``"bfloat16"`` or ``"float32"``.
        shards: The number of files.
        seed: Of the random numbers.

    Returns:
        ``out``.
    """
    check_dtype(dtype)
    if hidden % (2 * _HEAD_DIM) or vocab < VOCAB:
        raise ValueError(f"hidden must be a multiple of {2 * _HEAD_DIM}, vocab at least {VOCAB}")
    fixed = (1 if tied else 2) * vocab * hidden + layers * 3 * hidden * hidden
    per_row = layers * 3 * hidden  # of gate, up and down together
    rows = (megabytes * 10**6 / ITEM_BYTES[dtype] - fixed) / per_row
    intermediate = 64 * max(1, math.ceil(rows / 64))

    return write_random(
        out,
        _shapes(layers, hidden, intermediate, vocab, tied),
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "intermediate_size": intermediate,
            "num_attention_heads": hidden // _HEAD_DIM,
            "num_key_value_heads": hidden // _HEAD_DIM // 2,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "rope_theta": 10000.0,
            "tie_word_embeddings": tied,
        },
        dtype=dtype,
        shards=shards,
        seed=seed,
    )


def _shapes(
    layers: int, hidden: int, intermediate: int, vocab: int, tied: bool
) -> dict[str, tuple[int, ...]]:
    """Hub names and shapes, in the order of the forward pass."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (hidden // 2, hidden),
            f"{prefix}.self_attn.v_proj.weight": (hidden // 2, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, intermediate),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes
