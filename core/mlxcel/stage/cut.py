"""A rank's share of a tensor, cut out of the whole one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import mlx.core as mx

from mlxcel.stage.packed import Packed
from mlxcel.tensor.shard import Shard, ShardStrategy


def cut(value: mx.array | Packed, shard: Shard, rank: int, ranks: int) -> mx.array | Packed:
    """What ``rank`` of ``ranks`` holds of ``value``: a copy, so that the rest can be forgotten.

    The axis must be one that the shard divides. A packed matrix whose groups it does not divide
    is unpacked first.
    """
    if shard.strategy is ShardStrategy.REPLICATED:
        return value
    if isinstance(value, Packed):
        groups = value.scales.shape[shard.axis]
        if shard.strategy is ShardStrategy.ROW and not shard.divides(groups, ranks):
            return cut(value.unpack(), shard, rank, ranks)
        return attrs.evolve(
            value,
            weight=_cut(value.weight, shard, rank, ranks),
            scales=_cut(value.scales, shard, rank, ranks),
            biases=None if value.biases is None else _cut(value.biases, shard, rank, ranks),
            global_scale=_cut_overall(value.global_scale, shard, rank, ranks),
        )
    return _cut(value, shard, rank, ranks) if value.size > 1 else value


def cut_shape(shape: Sequence[int], shard: Shard, rank: int, ranks: int) -> tuple[int, ...]:
    """The shape of what :func:`cut` makes of an array of ``shape``."""
    if shard.strategy is ShardStrategy.REPLICATED:
        return tuple(shape)
    own = list(shape)
    own[shard.axis] = sum(map(len, shard.parts(shape[shard.axis], rank, ranks)))
    return tuple(own)


def _cut(value: mx.array, shard: Shard, rank: int, ranks: int) -> mx.array:
    parts = shard.parts(value.shape[shard.axis], rank, ranks)
    # A slice would be a view of the whole tensor and keep all of it in memory.
    rows = mx.array(list(itertools.chain(*parts)), dtype=mx.int32)
    return mx.take(value, rows, axis=shard.axis)


def _cut_overall(scale: mx.array | None, shard: Shard, rank: int, ranks: int) -> mx.array | None:
    """One number, or one for each expert of a stack."""
    if scale is None or scale.size == 1 or shard.strategy is not ShardStrategy.EXPERT:
        return scale
    return _cut(scale, shard, rank, ranks)
