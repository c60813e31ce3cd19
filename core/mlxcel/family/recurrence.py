"""Recurrence, which keeps a state of a sequence: its parameters, and that state.

One class per mechanism, as in :mod:`mlxcel.family.attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from mlxcel.family import fields
from mlxcel.family.caches import StateCacheKind
from mlxcel.family.shapes import TensorShape, convolution, linear, norm, vector
from mlxcel.tensor.shard import column, row

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig

FLOAT32_BYTES = 4

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
