"""The parameters of a model by name and shape, worked out from config.json alone.

A family lists every parameter of the whole model as mlx-lm names it; bytes, work and
placement then follow by the same rules as from the headers of a real checkpoint. The
functions here are the blocks that families are made of; what mixes positions (attention
and recurrence) is in :mod:`mlxcel.family.attention` and
:mod:`mlxcel.family.recurrence`, because it has a cache too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import attrs

from mlxcel.family import fields
from mlxcel.tensor.shard import REPLICATED, VOCAB, Shard, column, row

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
"""The two norms of most blocks: before attention, before the feed-forward network."""


@attrs.frozen
class TensorShape:
    """One parameter.

    Attributes:
        name: As mlx-lm's own model has it.
        shape: Its sizes.
        packs: Whether quantization packs it (the weight of a linear layer or an embedding).
        shard: How it is split over tensor-parallel ranks.
    """

    name: str
    shape: tuple[int, ...]
    packs: bool = False
    shard: Shard = REPLICATED


def linear(
    name: str, outputs: int, inputs: int, *, bias: bool = False, shard: Shard = REPLICATED
) -> Iterator[TensorShape]:
    """A linear layer: [outputs, inputs], and its bias."""
    yield TensorShape(f"{name}.weight", (outputs, inputs), packs=True, shard=shard)
    if bias:
        yield TensorShape(f"{name}.bias", (outputs,), shard=shard.of_bias())


def experts(
    name: str,
    count: int,
    outputs: int,
    inputs: int,
    *,
    bias: bool = False,
    shard: Shard = REPLICATED,
) -> Iterator[TensorShape]:
    """The same linear layer of ``count`` experts, stacked; ``shard`` is of each of them.

    Where its axis is -3, it is of the stack itself.
    """
    if shard is not REPLICATED and shard.axis > -3:
        shard = attrs.evolve(shard, stacked=True)
    yield TensorShape(f"{name}.weight", (count, outputs, inputs), packs=True, shard=shard)
    if bias:
        yield TensorShape(f"{name}.bias", (count, outputs), shard=shard.of_bias())


def embedding(name: str, rows: int, dim: int, *, shard: Shard = VOCAB) -> Iterator[TensorShape]:
    """A table of ``rows`` vectors."""
    yield TensorShape(f"{name}.weight", (rows, dim), packs=True, shard=shard)


def norm(name: str, dim: int, *, bias: bool = False) -> Iterator[TensorShape]:
    """The gain of an RMS norm; with ``bias`` a layer norm."""
    yield TensorShape(f"{name}.weight", (dim,))
    if bias:
        yield TensorShape(f"{name}.bias", (dim,))


def vector(name: str, *shape: int, shard: Shard = REPLICATED) -> Iterator[TensorShape]:
    """A parameter of its own, such as ``sinks`` or ``A_log``; never packed."""
    yield TensorShape(name, shape, shard=shard)


def convolution(
    name: str, channels: int, kernel: int, *, bias: bool, shard: Shard = REPLICATED
) -> Iterator[TensorShape]:
    """A causal convolution over each channel alone: [channels, kernel, 1].

    Args:
        shard: Of the channels, which are the outputs.
    """
    own = shard
    if shard is not REPLICATED:
        own = attrs.evolve(shard, axis=-3, counted=("groups",))
    yield TensorShape(f"{name}.weight", (channels, kernel, 1), shard=own)
    if bias:
        yield TensorShape(f"{name}.bias", (channels,), shard=shard.of_bias())


def gated_mlp(
    name: str, hidden: int, inner: int, *, bias: bool = False, at_once: bool = False
) -> Iterator[TensorShape]:
    """``gate_proj``, ``up_proj`` and ``down_proj``.

    Args:
        at_once: Whether something else than an addition follows within the block.
    """
    yield from linear(f"{name}.gate_proj", inner, hidden, bias=bias, shard=column())
    yield from linear(f"{name}.up_proj", inner, hidden, bias=bias, shard=column())
    yield from linear(f"{name}.down_proj", hidden, inner, bias=bias, shard=row(at_once=at_once))


def gated_experts(
    name: str,
    count: int,
    hidden: int,
    inner: int,
    *,
    bias: bool = False,
    at_once: bool = False,
) -> Iterator[TensorShape]:
    """The same three of ``count`` experts, stacked; every rank has a share of each expert."""
    down = row(at_once=at_once)
    yield from experts(f"{name}.gate_proj", count, inner, hidden, bias=bias, shard=column())
    yield from experts(f"{name}.up_proj", count, inner, hidden, bias=bias, shard=column())
    yield from experts(f"{name}.down_proj", count, hidden, inner, bias=bias, shard=down)


def corrected_router(name: str, count: int, hidden: int) -> Iterator[TensorShape]:
    """A router whose choice a bias corrects; a bare matrix, which quantization leaves alone."""
    yield from vector(f"{name}.weight", count, hidden)
    yield from vector(f"{name}.e_score_correction_bias", count)


def deepseek_moe(
    name: str, hidden: int, count: int, inner: int, *, shared: int = 0
) -> Iterator[TensorShape]:
    """DeepSeek V3's mixture: a corrected router, ``count`` experts, one MLP that all pass.

    Args:
        inner: The inner size of one expert.
        shared: The inner size of the MLP that every token passes; 0 for none.
    """
    yield from gated_experts(f"{name}.switch_mlp", count, hidden, inner)
    yield from corrected_router(f"{name}.gate", count, hidden)
    if shared:
        yield from gated_mlp(f"{name}.shared_experts", hidden, shared)


def deepseek_feed_forward(config: ModelConfig, name: str, index: int) -> Iterator[TensorShape]:
    """Layer ``index`` of a DeepSeek-like model behind attention: one MLP, or the mixture.

    Raises:
        CheckpointError: A size is missing.
    """
    hidden = fields.count(config, "hidden_size")
    if config.get("n_routed_experts") is None or not fields.experts_after_dense(config, index):
        return gated_mlp(name, hidden, fields.count(config, "intermediate_size"))
    inner = fields.count(config, "moe_intermediate_size")
    return deepseek_moe(
        name,
        hidden,
        fields.count(config, "n_routed_experts"),
        inner,
        shared=inner * fields.count(config, "n_shared_experts", default=0, minimum=0),
    )


def linear_moe(
    name: str, hidden: int, count: int, inner: int, *, shared: int = 0
) -> Iterator[TensorShape]:
    """Mixtral's and Qwen's mixture: the router is a linear layer.

    Args:
        inner: The inner size of one expert.
        shared: The inner size of the expert that every token passes, through a gate of its
            own (Qwen); 0 for none.
    """
    yield from linear(f"{name}.gate", count, hidden)
    yield from gated_experts(f"{name}.switch_mlp", count, hidden, inner)
    if shared:
        yield from gated_mlp(f"{name}.shared_expert", hidden, shared)
        yield from linear(f"{name}.shared_expert_gate", 1, hidden)


def block(
    name: str, hidden: int, *parts: Iterable[TensorShape], norms: Iterable[str] = PRE_NORMS
) -> Iterator[TensorShape]:
    """One layer: its ``parts`` and its residual-width norms."""
    for part in parts:
        yield from part
    for own in norms:
        yield from norm(f"{name}.{own}", hidden)


def decoder(
    config: ModelConfig,
    layer: Callable[[str, int], Iterable[TensorShape]],
    *,
    tied: bool,
    vocab: int | None = None,
    prefix: str = "",
    final_norm: str = "norm",
) -> Iterator[TensorShape]:
    """A whole model: embedding, layers, final norm, and a head unless it is tied.

    Args:
        layer: The parameters of one layer, of its name and its index.
        vocab: Instead of ``vocab_size`` of the config.
        prefix: What stands before ``model.`` and ``lm_head.``, with a trailing dot.

    Raises:
        CheckpointError: ``hidden_size`` or ``vocab_size`` is missing.
    """
    hidden = fields.count(config, "hidden_size")
    rows = vocab or fields.count(config, "vocab_size")
    body = (
        shape
        for index in range(config.num_layers)
        for shape in layer(f"{prefix}model.layers.{index}", index)
    )
    return itertools.chain(
        embedding(f"{prefix}model.embed_tokens", rows, hidden),
        body,
        norm(f"{prefix}model.{final_norm}", hidden),
        () if tied else linear(f"{prefix}lm_head", rows, hidden, shard=VOCAB),
    )
