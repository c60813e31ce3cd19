"""A rank's share of a tensor: read out of its file, or cut out of the whole one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import attrs
import mlx.core as mx

from mlxcel.checkpoint.headers import TensorHeader
from mlxcel.stage.packed import Packed
from mlxcel.stage.slices import read_share
from mlxcel.tensor.shard import Shard, ShardStrategy


@attrs.frozen
class Share:
    """What ``rank`` of ``ranks`` holds of what is split like ``shard``."""

    shard: Shard
    rank: int
    ranks: int

    def parts(self, size: int) -> tuple[range, ...]:
        """What it is of the split axis, of ``size``."""
        return self.shard.parts(size, self.rank, self.ranks)


def cut(
    name: str,
    value: mx.array | Packed,
    share: Share,
    stored: Mapping[str, TensorHeader],
) -> mx.array | Packed:
    """The ``share`` of ``value``: a copy, so that the rest can be forgotten.

    The axis must be one that the shard divides. A packed matrix whose groups it does not divide
    is unpacked first.

    Args:
        name: What the model calls the parameter.
        stored: Which parameters are tensors of a file, unchanged: only the share of these is
            read. For all others ``value`` is evaluated.

    Raises:
        CheckpointError: A file is not what it was when its header was read.
    """
    shard = share.shard
    if shard.strategy is ShardStrategy.REPLICATED:
        return value
    if not isinstance(value, Packed):
        return _cut(value, share, stored.get(name)) if value.size > 1 else value
    groups = value.scales.shape[shard.axis]
    if shard.strategy is ShardStrategy.ROW and not shard.divides(groups, share.ranks):
        return _cut(value.unpack(), share, None)
    module = name.rpartition(".")[0]
    overall = value.global_scale
    if overall is not None and overall.size > 1 and shard.strategy is ShardStrategy.EXPERT:
        overall = _cut(overall, share, stored.get(f"{module}.global_scale"))
    return attrs.evolve(
        value,
        weight=_cut(value.weight, share, stored.get(f"{module}.weight")),
        scales=_cut(value.scales, share, stored.get(f"{module}.scales")),
        biases=None
        if value.biases is None
        else _cut(value.biases, share, stored.get(f"{module}.biases")),
        global_scale=overall,
    )


def _cut(value: mx.array, share: Share, stored: TensorHeader | None) -> mx.array:
    axis = share.shard.axis
    parts = share.parts(value.shape[axis])
    if stored is not None:
        return read_share(stored, value.dtype, axis, parts)
    # A slice would be a view of the whole tensor and keep all of it in memory.
    rows = mx.array(list(itertools.chain(*parts)), dtype=mx.int32)
    return mx.take(value, rows, axis=axis)
