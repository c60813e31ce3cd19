"""What mixes the positions of a sequence: its parameters, and what it keeps of the sequence.

One class per mechanism. Each knows its sizes, gives its parameters by ``shapes`` and its
cache by ``cache``; ``of`` reads the sizes off a config under their usual names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import attrs

from mlxcel.family import fields
from mlxcel.family.caches import KVCacheKind, RotatingCacheKind, StateCacheKind
from mlxcel.family.shapes import TensorShape, convolution, experts, linear, norm, vector
from mlxcel.tensor.shard import column, row

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig

FLOAT32_BYTES = 4
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


_DELTA_SIZES = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
_MAMBA_SIZES = ("num_heads", "intermediate_size", "n_groups", "conv_dim")
"""What mlx-lm's modules of these mechanisms count."""


@attrs.frozen
class GatedDelta:
    """Qwen's gated delta net.

    Attributes:
        hidden: Width of the residual stream.
        key_heads, key_dim: Heads of queries and keys, and the width of each.
        value_heads, value_dim: Heads of values, and the width of each.
        kernel: Positions of the convolution.
        fused: Queries, keys, values and gate come out of one projection (Qwen3-Next), not four.
    """

    hidden: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int
    fused: bool = False

    @classmethod
    def of(cls, config: ModelConfig, *, fused: bool = False) -> GatedDelta:
        """The linear attention of ``config``.

        Raises:
            CheckpointError: A size is missing, or the heads do not divide.
        """
        key_heads = fields.count(config, "linear_num_key_heads")
        value_heads = fields.count(config, "linear_num_value_heads")
        if value_heads % key_heads:
            raise fields.contradiction(
                config,
                f"linear_num_value_heads {value_heads} is no multiple of "
                f"linear_num_key_heads {key_heads}",
            )
        return cls(
            fields.count(config, "hidden_size"),
            key_heads,
            fields.count(config, "linear_key_head_dim"),
            value_heads,
            fields.count(config, "linear_value_head_dim"),
            fields.count(config, "linear_conv_kernel_dim", default=4),
            fused,
        )

    @property
    def channels(self) -> int:
        """Queries, keys and values together: what the convolution runs over."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def shapes(self, name: str) -> Iterator[TensorShape]:
        """The projections, the convolution, and what rules the decay of the state."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        shard = column(self.key_heads, what="key heads")
        per_head = attrs.evolve(shard, axis=-1)
        qkv = attrs.evolve(shard, segments=(keys, keys, values))
        yield from convolution(f"{name}.conv1d", self.channels, self.kernel, bias=False, shard=qkv)
        if self.fused:  # the rows of one key head stand together
            counted = attrs.evolve(shard, counted=_DELTA_SIZES)
            outputs = self.channels + values
            yield from linear(f"{name}.in_proj_qkvz", outputs, self.hidden, shard=counted)
            yield from linear(f"{name}.in_proj_ba", 2 * self.value_heads, self.hidden, shard=shard)
        else:
            counted = attrs.evolve(qkv, counted=_DELTA_SIZES)
            yield from linear(f"{name}.in_proj_qkv", self.channels, self.hidden, shard=counted)
            yield from linear(f"{name}.in_proj_z", values, self.hidden, shard=shard)
            yield from linear(f"{name}.in_proj_b", self.value_heads, self.hidden, shard=shard)
            yield from linear(f"{name}.in_proj_a", self.value_heads, self.hidden, shard=shard)
        yield from vector(f"{name}.dt_bias", self.value_heads, shard=per_head)
        yield from vector(f"{name}.A_log", self.value_heads, shard=per_head)
        yield from norm(f"{name}.norm", self.value_dim)
        yield from linear(
            f"{name}.out_proj", self.hidden, values, shard=row(self.key_heads, what="key heads")
        )

    def cache(self) -> StateCacheKind:
        """The tail of the convolution, and a matrix per head in float32."""
        return StateCacheKind(
            (
                ((self.kernel - 1) * self.channels, None),
                (self.value_heads * self.value_dim * self.key_dim, FLOAT32_BYTES),
            ),
            split=True,
        )


@attrs.frozen
class Mamba1:
    """A selective state space (Mamba) as Jamba has it: with norms on its three small inputs.

    Tensor-parallel ranks share the channels. What ``x_proj`` makes of them feeds norms, so it is
    added up before the scan; the block must be able to run in step.

    Attributes:
        hidden: Width of the residual stream.
        inner: Channels.
        state: Numbers per channel in the state.
        kernel: Positions of the convolution.
        rank: Width of the compressed time step.
        bias: Biases on the projections in and out.
        conv_bias: A bias on the convolution.
    """

    hidden: int
    inner: int
    state: int
    kernel: int
    rank: int
    bias: bool = False
    conv_bias: bool = True

    def shapes(self, name: str) -> Iterator[TensorShape]:
        """The projections, the convolution, the norms, and what rules the state."""
        channels, inner = column(), self.inner
        per_channel = attrs.evolve(channels, axis=-1)
        yield from linear(
            f"{name}.in_proj",
            2 * inner,
            self.hidden,
            bias=self.bias,
            shard=attrs.evolve(channels, segments=(inner, inner)),
        )
        yield from convolution(
            f"{name}.conv1d", inner, self.kernel, bias=self.conv_bias, shard=channels
        )
        small = self.rank + 2 * self.state
        yield from linear(f"{name}.x_proj", small, inner, shard=row(within=True))
        yield from linear(f"{name}.dt_proj", inner, self.rank, bias=True, shard=channels)
        yield from vector(f"{name}.A_log", inner, self.state, shard=channels)
        yield from vector(f"{name}.D", inner, shard=per_channel)
        yield from linear(f"{name}.out_proj", self.hidden, inner, bias=self.bias, shard=row())
        yield from norm(f"{name}.dt_layernorm", self.rank)
        yield from norm(f"{name}.b_layernorm", self.state)
        yield from norm(f"{name}.c_layernorm", self.state)

    def cache(self) -> StateCacheKind:
        """The tail of the convolution and the state, which is float32 at most."""
        return StateCacheKind(
            (((self.kernel - 1) * self.inner, None), (self.inner * self.state, FLOAT32_BYTES)),
            split=True,
        )


@attrs.frozen
class Mamba2:
    """A state space with scalar decay per head (Mamba-2).

    Attributes:
        hidden: Width of the residual stream.
        heads, head_dim: Heads, and the width of each.
        groups, state: Groups that share their B and C, and the width of each.
        kernel: Positions of the convolution.
        bias: Biases on the projections in and out.
        conv_bias: A bias on the convolution.
    """

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    bias: bool = False
    conv_bias: bool = True

    @classmethod
    def of(cls, config: ModelConfig) -> Mamba2:
        """The mixer of ``config``, under Nemotron-H's names.

        Raises:
            CheckpointError: A size is missing, or heads and groups do not divide.
        """
        heads, groups = fields.count(config, "mamba_num_heads"), fields.count(config, "n_groups")
        if heads % groups:
            raise fields.contradiction(
                config, f"mamba_num_heads {heads} is no multiple of n_groups {groups}"
            )
        return cls(
            fields.count(config, "hidden_size"),
            heads,
            fields.count(config, "mamba_head_dim"),
            groups,
            fields.count(config, "ssm_state_size"),
            fields.count(config, "conv_kernel"),
            fields.flag(config, "mamba_proj_bias"),
            fields.flag(config, "use_conv_bias"),
        )

    @property
    def inner(self) -> int:
        """Channels of the values."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Values, B and C together: what the convolution runs over."""
        return self.inner + 2 * self.groups * self.state

    def shapes(self, name: str) -> Iterator[TensorShape]:
        """The projections, the convolution, the gated norm, and what rules the state."""
        inputs, shared = self.inner + self.channels + self.heads, self.groups * self.state
        channels, by_group = (self.inner, shared, shared), column(self.groups, what="groups")
        per_head = attrs.evolve(by_group, axis=-1)
        yield from convolution(
            f"{name}.conv1d",
            self.channels,
            self.kernel,
            bias=self.conv_bias,
            shard=attrs.evolve(by_group, segments=channels),
        )
        yield from linear(
            f"{name}.in_proj",
            inputs,
            self.hidden,
            bias=self.bias,
            shard=attrs.evolve(
                by_group,
                segments=(self.inner, *channels, self.heads),
                counted=_MAMBA_SIZES,
            ),
        )
        yield from vector(f"{name}.dt_bias", self.heads, shard=per_head)
        yield from vector(f"{name}.A_log", self.heads, shard=per_head)
        yield from vector(f"{name}.D", self.heads, shard=per_head)
        yield from vector(f"{name}.norm.weight", self.inner, shard=per_head)
        yield from linear(
            f"{name}.out_proj",
            self.hidden,
            self.inner,
            bias=self.bias,
            shard=row(self.groups, what="groups"),
        )

    def cache(self) -> StateCacheKind:
        """The tail of the convolution and the state, which is float32 at most."""
        return StateCacheKind(
            (
                ((self.kernel - 1) * self.channels, None),
                (self.inner * self.state, FLOAT32_BYTES),
            ),
            split=True,
        )
