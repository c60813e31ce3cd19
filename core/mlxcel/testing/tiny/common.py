"""What the recipes of several families share: sizes, and the way experts lie on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlxcel.testing.tiny.recipe import Weights
from mlxcel.testing.tiny.tokenizer import BOS, EOS, PAD, VOCAB

if TYPE_CHECKING:
    import mlx.core as mx

TOKENS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

# heads * head_dim = intermediate = 128: what a row-parallel layer reads divides in two on a
# quantization group of 64, and in four on one of 32.
DENSE: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

PROJECTIONS = {name: name for name in ("gate_proj", "up_proj", "down_proj")}


def one_per_expert(
    weights: Weights, *, stacked: str = "switch_mlp", names: dict[str, str] | None = None
) -> Weights:
    """Each tensor of all experts, ``….<stacked>.<ours>.weight``, as one tensor per expert.

    Args:
        names: From a projection's name in mlx-lm to its name on the hub; the same by default.
    """
    hub: Weights = {}
    for name, value in weights.items():
        module, found, rest = name.partition(f".{stacked}.")
        if not found:
            hub[name] = value
            continue
        projection, _, leaf = rest.partition(".")
        theirs = (names or PROJECTIONS)[projection]
        hub |= {f"{module}.experts.{e}.{theirs}.{leaf}": value[e] for e in range(value.shape[0])}
    return hub


def latents_in_one(weights: Weights) -> Weights:
    """Keys and values of a latent (``embed_q``, ``unembed_out``) as one ``kv_b_proj``."""
    import mlx.core as mx

    hub: Weights = {}
    for name, value in weights.items():
        if name.endswith(".embed_q.weight"):
            values = weights[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([value.swapaxes(-1, -2), values], axis=1)
            hub[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif not name.endswith(".unembed_out.weight"):
            hub[name] = value
    return hub


def channels_first(weights: Weights) -> Weights:
    """Convolutions as [channels, 1, width]."""
    return {
        name: value.moveaxis(1, 2) if name.endswith("conv1d.weight") else value
        for name, value in weights.items()
    }


def norms_less_one(weights: Weights) -> Weights:
    """Norms whose 1 the model adds, but those of the recurrent layers."""
    ends = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
    return {name: value - 1 if name.endswith(ends) else value for name, value in weights.items()}


def not_numbers(shapes: Mapping[str, tuple[int, ...]], like: mx.array) -> Weights:
    """Tensors that show in the logits if anything reads them, of the dtype of ``like``."""
    import mlx.core as mx

    return {name: mx.full(shape, float("nan"), like.dtype) for name, shape in shapes.items()}
