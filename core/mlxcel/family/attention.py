"""Attention: its parameters, and what it keeps of a sequence.

One class per mechanism. Each knows its sizes, gives its parameters by ``shapes`` and its
cache by ``cache``; ``of`` reads the sizes off a config under their usual names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import attrs

from mlxcel.family import fields
from mlxcel.family.caches import KVCacheKind, RotatingCacheKind
from mlxcel.family.shapes import TensorShape, experts, linear, norm
from mlxcel.tensor.shard import column, row

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig

QK_NORMS = ("q_norm", "k_norm")

HEADS = ("n_heads", "num_heads", "num_attention_heads")
KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
"""What mlx-lm calls the numbers of heads."""

QUERY_HEADS = "query heads"


@attrs.frozen
class Attention:
    """Grouped-query attention.

    Attributes:
        hidden: Width of the residual stream.
        heads, kv_heads, head_dim: Heads of the queries, of keys and values, width of each.
        bias: Biases on the three input projections.
        out_bias: A bias on the output projection.
        norms: Names of norms over one head's queries and keys.
        gated: The queries come with a gate of the same size.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    out_bias: bool = False
    norms: tuple[str, ...] = ()
    gated: bool = False

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        own_head_dim: bool = True,
        bias: bool = False,
        out_bias: bool = False,
        norms: tuple[str, ...] = (),
        gated: bool = False,
    ) -> Attention:
        """The attention of ``config``.

        Args:
            own_head_dim: Whether a ``head_dim`` of the config counts; without one, or if it
                does not count, it is hidden_size / num_attention_heads.

        Raises:
            CheckpointError: A size is missing, or the heads do not divide.
        """
        hidden = fields.count(config, "hidden_size")
        heads = fields.count(config, "num_attention_heads")
        kv_heads = fields.count(config, "num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise fields.contradiction(
                config,
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}",
            )
        if own_head_dim and config.get("head_dim") is not None:
            dim = fields.count(config, "head_dim")
        elif hidden % heads == 0:
            dim = hidden // heads
        else:
            raise fields.contradiction(
                config, f"hidden_size {hidden} is no multiple of num_attention_heads {heads}"
            )
        return cls(hidden, heads, kv_heads, dim, bias, out_bias, norms, gated)

    def shapes(self, name: str) -> Iterator[TensorShape]:
        """``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` and the norms."""
        yield from self.query_shape(f"{name}.q_proj")
        yield from self.key_shape(f"{name}.k_proj", counted=KV_HEADS)
        yield from self.key_shape(f"{name}.v_proj")
        yield from self.out_shape(f"{name}.o_proj")
        for own in self.norms:
            yield from norm(f"{name}.{own}", self.head_dim)

    def query_shape(self, name: str) -> Iterator[TensorShape]:
        """The projection to queries, and to their gates: by heads."""
        outputs = self.heads * self.head_dim * (2 if self.gated else 1)
        shard = column(self.heads, counted=HEADS, what=QUERY_HEADS)
        return linear(name, outputs, self.hidden, bias=self.bias, shard=shard)

    def key_shape(self, name: str, *, counted: tuple[str, ...] = ()) -> Iterator[TensorShape]:
        """The projection to keys or to values: by heads, which ranks may have to share."""
        shard = column(self.kv_heads, repeats=True, counted=counted, what="KV heads")
        outputs = self.kv_heads * self.head_dim
        return linear(name, outputs, self.hidden, bias=self.bias, shard=shard)

    def out_shape(self, name: str) -> Iterator[TensorShape]:
        """The projection back to the residual stream."""
        inputs, shard = self.heads * self.head_dim, row(self.heads, what=QUERY_HEADS)
        return linear(name, self.hidden, inputs, bias=self.out_bias, shard=shard)

    def cache(self, window: int | None = None) -> KVCacheKind | RotatingCacheKind:
        """Keys and values of every position, or of the last ``window`` ones."""
        if window is None:
            return KVCacheKind(self.kv_heads, self.head_dim, self.head_dim)
        return RotatingCacheKind(self.kv_heads, self.head_dim, self.head_dim, window)

    def caches(
        self, config: ModelConfig, types: Iterable[str]
    ) -> tuple[KVCacheKind | RotatingCacheKind, ...]:
        """One cache per layer, of layers of the attention ``types``.

        Raises:
            CheckpointError: A layer is sliding, and ``sliding_window`` is missing.
        """
        return tuple(
            self.cache(fields.count(config, "sliding_window") if kind == fields.SLIDING else None)
            for kind in types
        )


@attrs.frozen
class LatentAttention:
    """DeepSeek's multi-head latent attention (MLA): one compressed key for all heads.

    Attributes:
        hidden: Width of the residual stream.
        heads: Query heads.
        query_rank: Width of the compressed queries; None for a plain projection.
        rank: Width of the compressed keys and values.
        nope, rope: Widths of a query without and with positions.
        value_dim: Width of one head's values.
        bias: Biases on the projections from and to the residual stream.
    """

    hidden: int
    heads: int
    query_rank: int | None
    rank: int
    nope: int
    rope: int
    value_dim: int
    bias: bool = False

    @classmethod
    def of(cls, config: ModelConfig, *, bias: bool = False) -> LatentAttention:
        """The attention of ``config``.

        Raises:
            CheckpointError: A size is missing. ``q_lora_rank`` may be null, not absent.
        """
        if "q_lora_rank" in config.text and config.text["q_lora_rank"] is None:
            query_rank = None
        else:
            query_rank = fields.count(config, "q_lora_rank")
        return cls(
            fields.count(config, "hidden_size"),
            fields.count(config, "num_attention_heads"),
            query_rank,
            fields.count(config, "kv_lora_rank"),
            fields.count(config, "qk_nope_head_dim"),
            fields.count(config, "qk_rope_head_dim"),
            fields.count(config, "v_head_dim"),
            bias,
        )

    def shapes(self, name: str) -> Iterator[TensorShape]:
        """The projections, with ``kv_b_proj`` as mlx-lm splits it: by head.

        Ranks share the heads; what is compressed, and cached, all of them have.
        """
        queries = self.heads * (self.nope + self.rope)
        by_head = column(self.heads, counted=HEADS, what=QUERY_HEADS)
        matrices = column(self.heads, axis=-3, what=QUERY_HEADS)
        if self.query_rank is None:
            yield from linear(f"{name}.q_proj", queries, self.hidden, shard=by_head)
        else:
            yield from linear(f"{name}.q_a_proj", self.query_rank, self.hidden, bias=self.bias)
            yield from norm(f"{name}.q_a_layernorm", self.query_rank)
            yield from linear(f"{name}.q_b_proj", queries, self.query_rank, shard=by_head)
        latent = self.rank + self.rope
        yield from linear(f"{name}.kv_a_proj_with_mqa", latent, self.hidden, bias=self.bias)
        yield from norm(f"{name}.kv_a_layernorm", self.rank)
        yield from experts(f"{name}.embed_q", self.heads, self.rank, self.nope, shard=matrices)
        yield from experts(
            f"{name}.unembed_out", self.heads, self.value_dim, self.rank, shard=matrices
        )
        yield from linear(
            f"{name}.o_proj",
            self.hidden,
            self.heads * self.value_dim,
            bias=self.bias,
            shard=row(self.heads, what=QUERY_HEADS),
        )

    def cache(self) -> KVCacheKind:
        """The compressed keys and values, and the one key that has positions."""
        return KVCacheKind(1, self.rank, self.rope)
