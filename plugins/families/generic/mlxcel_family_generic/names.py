"""What the parts of mlx-lm's models are called, on the hub and by mlx-lm."""

from __future__ import annotations

import re

from mlxcel.family import Part, Place

TABLES = frozenset(
    "embed_tokens word_embeddings wte tok_embeddings token_embeddings embed_in embeddings "
    "embedding".split()
)
"""Token embeddings."""

HEADS = frozenset(["lm_head", "output", "embed_out"])
"""Output projections."""

_NORMS = frozenset(
    "norm ln_f norm_f final_layernorm final_layer_norm final_norm embedding_norm".split()
)
"""What stands before the output projection; some call it after the embedding that it is not."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_BUFFERS = tuple(
    f".{owner}.{buffer}" for owner in ("attn", "attention") for buffer in ("bias", "masked_bias")
)
"""Masks that old checkpoints carry along, under names like those of biases."""


def place(name: str, num_layers: int) -> Place:
    """The part of the model that the tensor ``name`` belongs to.

    What stands outside the layers under no known name helps to make the first hidden states.
    """
    if match := _LAYER.search(name):
        layer = int(match[1])
        if layer >= num_layers or name.endswith(_BUFFERS):
            return Place(Part.UNUSED)
        return Place(Part.LAYER, layer)
    module = name.rpartition(".")[0].rpartition(".")[2]
    if is_head(name) or module in _NORMS:
        return Place(Part.HEAD)
    return Place(Part.TABLE if module in TABLES else Part.EMBEDDING)


def is_head(name: str) -> bool:
    """Whether the tensor ``name`` is part of an output projection."""
    return not HEADS.isdisjoint(name.split("."))
