"""The Gemma 4 family: the text tower of E2B, E4B, 26B-A4B and 31B."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import attrs

from mlxcel.family import Family, LayerAdjacencyGroup, Part, Place, fields
from mlxcel.family.mixers import Attention
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

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.family.caches import CacheKind
    from mlxcel.family.transformer import TransformerStage


class Gemma4(Family):
    """Global and sliding layers; per-layer inputs; a tail of layers that share K and V."""

    api_version = "1.0"
    wire_names = ("gemma4", "gemma4_vlm")
    model_types = ("gemma4_text", "gemma4_unified")
    tied_by_default = True

    def stage_class(self) -> type[TransformerStage]:
        from mlxcel_family_gemma4.stage import Gemma4Stage

        return Gemma4Stage

    def adjacency(self, config: ModelConfig) -> tuple[LayerAdjacencyGroup, ...]:
        """Each KV-shared layer stays with the layer whose keys and values it reads."""
        types, own = layer_types(config), config.num_layers - shared_layers(config)
        source = {kind: index for index, kind in enumerate(types[:own])}
        return tuple(
            LayerAdjacencyGroup(
                source[types[layer]],
                layer + 1,
                f"layer {layer} reads the keys and values of layer {source[types[layer]]} "
                f"({types[layer]})",
            )
            for layer in range(own, config.num_layers)
        )

    def place(self, name: str, config: ModelConfig) -> Place:
        if "_per_layer." in name or "per_layer_model_projection" in name:
            return Place(Part.EMBEDDING)
        if "per_layer_projection_norm" in name:
            return Place(Part.EMBEDDING)
        place = super().place(name, config)
        own = config.num_layers - shared_layers(config)
        if place.layer is not None and place.layer >= own and _is_kv(name):
            return Place(Part.UNUSED)  # hub checkpoints carry K and V there that nobody reads
        return place

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        nested = config.text is not config.raw
        outer = config.raw.get("vocab_size", 262144)
        config, prefix = _complete(config), "language_model." if nested else ""
        whole = decoder(
            config,
            lambda name, index: _layer(name, index, config),
            tied=self.tied(config),
            vocab=fields.checked(config, "vocab_size", outer) if nested else None,
            prefix=prefix,
        )
        return itertools.chain(whole, _per_layer_inputs(f"{prefix}model", config))

    def caches(self, config: ModelConfig) -> tuple[CacheKind | None, ...]:
        """None in the layers that read another one's keys and values."""
        config = _complete(config)
        shared, types = shared_layers(config), layer_types(config)
        window = fields.count(config, "sliding_window")
        own = (
            _attention(config, kind).cache(window if kind == fields.SLIDING else None)
            for kind in types[: config.num_layers - shared]
        )
        return (*own, *(None,) * shared)


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


def _is_kv(name: str) -> bool:
    return any(part in name for part in (".self_attn.k_proj", ".self_attn.v_proj", ".k_norm"))


# Parameters. What published configs leave out has transformers' default.

_LEFT_OUT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "sliding_window": 512,
}


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
    dim = fields.count(config, "global_head_dim", default=attention.head_dim, minimum=0)
    return attrs.evolve(attention, kv_heads=heads, head_dim=dim or attention.head_dim)


def _values_are_keys(config: ModelConfig, kind: str) -> bool:
    return kind == fields.FULL and fields.flag(config, "attention_k_eq_v", default=False)


def _attention_shapes(
    name: str, attention: Attention, *, own_keys: bool, own_values: bool
) -> Iterator[TensorShape]:
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    yield from linear(f"{name}.q_proj", queries, attention.hidden)
    yield from norm(f"{name}.q_norm", attention.head_dim)
    if own_keys:
        yield from linear(f"{name}.k_proj", keys, attention.hidden)
        yield from norm(f"{name}.k_norm", attention.head_dim)
    if own_values:
        yield from linear(f"{name}.v_proj", keys, attention.hidden)
    yield from linear(f"{name}.o_proj", attention.hidden, queries)


def _layer(name: str, index: int, config: ModelConfig) -> Iterator[TensorShape]:
    """One layer; those that share keys and values may have an MLP of twice the width."""
    kind = layer_types(config)[index]
    attention, hidden = _attention(config, kind), fields.count(config, "hidden_size")
    own_keys = index < config.num_layers - shared_layers(config)
    own_values = own_keys and not _values_are_keys(config, kind)
    wide = not own_keys and fields.flag(config, "use_double_wide_mlp", default=True)
    inner = fields.count(config, "intermediate_size") * (2 if wide else 1)
    own = _attention_shapes(
        f"{name}.self_attn", attention, own_keys=own_keys, own_values=own_values
    )
    parts: list[Iterable[TensorShape]] = [own, gated_mlp(f"{name}.mlp", hidden, inner)]
    norms = [*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if fields.flag(config, "enable_moe_block", default=False):
        parts.append(_moe(name, hidden, config))
        norms += ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
        norms += ["pre_feedforward_layernorm_2"]
    if width := fields.count(config, "hidden_size_per_layer_input", default=0, minimum=0):
        parts.append(linear(f"{name}.per_layer_input_gate", width, hidden))
        parts.append(linear(f"{name}.per_layer_projection", hidden, width))
        norms += ["post_per_layer_input_norm"]
    return block(name, hidden, *parts, vector(f"{name}.layer_scalar", 1), norms=norms)


def _moe(name: str, hidden: int, config: ModelConfig) -> Iterator[TensorShape]:
    number = fields.count(config, "num_experts")
    inner = fields.count(config, "moe_intermediate_size")
    yield from linear(f"{name}.router.proj", number, hidden)
    yield from vector(f"{name}.router.scale", hidden)
    yield from vector(f"{name}.router.per_expert_scale", number)
    yield from gated_experts(f"{name}.experts.switch_glu", number, hidden, inner)


def _per_layer_inputs(name: str, config: ModelConfig) -> Iterator[TensorShape]:
    """What the first stage makes the per-layer inputs of, where there are any."""
    width = fields.count(config, "hidden_size_per_layer_input", default=0, minimum=0)
    if not width:
        return
    rows, every = fields.count(config, "vocab_size_per_layer_input"), config.num_layers * width
    yield from embedding(f"{name}.embed_tokens_per_layer", rows, every)
    hidden = fields.count(config, "hidden_size")
    yield from linear(f"{name}.per_layer_model_projection", every, hidden)
    yield from norm(f"{name}.per_layer_projection_norm", width)


plugin = Gemma4()
