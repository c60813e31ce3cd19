"""What the layers of a Gemma 4 are made of, worked out from config.json."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import attrs

from mlxcel.family import fields
from mlxcel.family.attention import KV_HEADS, Attention
from mlxcel.family.shapes import (
    PRE_NORMS,
    TensorShape,
    block,
    decoder,
    embedding,
    gated_experts,
    gated_mlp,
    linear,
    norm,
    vector,
)
from mlxcel.tensor.shard import REPLICATED

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind

_LEFT_OUT = {  # by published configs, because transformers has it as default
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "sliding_window": 512,
}
_OUTER_VOCAB = 262144
_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_MOE_NORMS = (
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "pre_feedforward_layernorm_2",
)


def shared_layers(config: ModelConfig) -> int:
    """How many layers at the end compute no keys and values of their own.

    Raises:
        CheckpointError: As many as there are layers, or more.
    """
    shared = fields.count(config, "num_kv_shared_layers", default=20, minimum=0)
    if shared >= config.num_layers:
        raise fields.contradiction(
            config, f"num_kv_shared_layers {shared} leaves none of {config.num_layers} layers"
        )
    return shared


def layer_types(config: ModelConfig) -> tuple[str, ...]:
    """The attention kind of each layer; without ``layer_types`` every n-th one is global.

    Raises:
        CheckpointError: There is not one known type per layer.
    """
    every = fields.count(config, "sliding_window_pattern", default=5)
    return fields.attention_types(
        config, lambda index: fields.SLIDING if (index + 1) % every else fields.FULL
    )


def sources(config: ModelConfig) -> dict[int, int]:
    """Each layer without keys and values of its own, to the one whose it reads.

    That is the last one of its type before them.

    Raises:
        CheckpointError: There is none of its type.
    """
    types, own = layer_types(config), config.num_layers - shared_layers(config)
    last = {kind: index for index, kind in enumerate(types[:own])}
    if missing := set(types[own:]) - last.keys():
        raise fields.contradiction(
            config, f"layer_types has no {missing.pop()!r} before the layers that share keys"
        )
    return {layer: last[types[layer]] for layer in range(own, config.num_layers)}


def model_shapes(config: ModelConfig, *, tied: bool) -> Iterator[TensorShape]:
    """Every parameter of the whole model."""
    prefix, vocab = "", None
    if fields.nested(config):  # beside a vision tower the outer config's vocab_size counts
        outer = config.raw.get("vocab_size", _OUTER_VOCAB)
        prefix, vocab = "language_model.", fields.checked(config, "vocab_size", outer)
    config = _complete(config)
    types, borrowing = layer_types(config), sources(config)
    whole = decoder(
        config,
        lambda name, index: _layer(name, types[index], index not in borrowing, config),
        tied=tied,
        vocab=vocab,
        prefix=prefix,
    )
    return itertools.chain(whole, _per_layer_inputs(f"{prefix}model", config))


def layer_caches(config: ModelConfig) -> tuple[CacheKind | None, ...]:
    """What each layer keeps: None in those that read another one's keys and values."""
    config = _complete(config)
    own = layer_types(config)[: config.num_layers - len(sources(config))]
    caches = (cache for kind in own for cache in _attention(config, kind).caches(config, [kind]))
    return (*caches, *(None,) * len(sources(config)))


def _complete(config: ModelConfig) -> ModelConfig:
    return attrs.evolve(config, text={**_LEFT_OUT, **config.text})


def _attention(config: ModelConfig, kind: str) -> Attention:
    """The attention of the layers of one ``kind``: global ones have sizes of their own."""
    attention = Attention.of(config)
    if kind == fields.SLIDING:
        return attention
    heads = attention.kv_heads
    if _values_are_keys(config, kind):
        heads = fields.count(config, "num_global_key_value_heads", default=heads)
    dim = fields.count(config, "global_head_dim", default=attention.head_dim)
    return attrs.evolve(attention, kv_heads=heads, head_dim=dim)


def _values_are_keys(config: ModelConfig, kind: str) -> bool:
    return kind == fields.FULL and fields.flag(config, "attention_k_eq_v", default=False)


def _layer(name: str, kind: str, own_keys: bool, config: ModelConfig) -> Iterator[TensorShape]:
    """One layer; those that share keys and values may have an MLP of twice the width."""
    hidden, inner = fields.count(config, "hidden_size"), fields.count(config, "intermediate_size")
    if not own_keys and fields.flag(config, "use_double_wide_mlp", default=True):
        inner *= 2
    parts: list[Iterable[TensorShape]] = [
        _attention_shapes(f"{name}.self_attn", kind, own_keys, config),
        gated_mlp(f"{name}.mlp", hidden, inner),
        vector(f"{name}.layer_scalar", 1),
    ]
    norms = list(_NORMS)
    if fields.flag(config, "enable_moe_block", default=False):
        parts.append(_moe(name, hidden, config))
        norms += _MOE_NORMS
    if width := _input_width(config):
        parts.append(linear(f"{name}.per_layer_input_gate", width, hidden))
        parts.append(linear(f"{name}.per_layer_projection", hidden, width))
        norms.append("post_per_layer_input_norm")
    return block(name, hidden, *parts, norms=norms)


def _attention_shapes(
    name: str, kind: str, own_keys: bool, config: ModelConfig
) -> Iterator[TensorShape]:
    attention = _attention(config, kind)
    yield from attention.query_shape(f"{name}.q_proj")
    yield from norm(f"{name}.q_norm", attention.head_dim)
    if own_keys:
        yield from attention.key_shape(f"{name}.k_proj", counted=KV_HEADS)
        yield from norm(f"{name}.k_norm", attention.head_dim)
        if not _values_are_keys(config, kind):
            yield from attention.key_shape(f"{name}.v_proj")
    yield from attention.out_shape(f"{name}.o_proj")


def _moe(name: str, hidden: int, config: ModelConfig) -> Iterator[TensorShape]:
    number = fields.count(config, "num_experts")
    inner = fields.count(config, "moe_intermediate_size")
    yield from linear(f"{name}.router.proj", number, hidden)
    yield from vector(f"{name}.router.scale", hidden)
    yield from vector(f"{name}.router.per_expert_scale", number)
    yield from gated_experts(f"{name}.experts.switch_glu", number, hidden, inner)


def _per_layer_inputs(name: str, config: ModelConfig) -> Iterator[TensorShape]:
    """What the first stage makes the per-layer inputs of, where there are any."""
    if width := _input_width(config):
        rows, every = fields.count(config, "vocab_size_per_layer_input"), config.num_layers * width
        yield from embedding(f"{name}.embed_tokens_per_layer", rows, every, shard=REPLICATED)
        hidden = fields.count(config, "hidden_size")
        yield from linear(f"{name}.per_layer_model_projection", every, hidden)
        yield from norm(f"{name}.per_layer_projection_norm", width)


def _input_width(config: ModelConfig) -> int:
    """The width of one layer's own input; 0 where layers have none."""
    return fields.count(config, "hidden_size_per_layer_input", default=0, minimum=0)
