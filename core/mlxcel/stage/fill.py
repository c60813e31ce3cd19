"""Give the ranks of a stage their parameters, one tensor after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence

import attrs
import mlx.core as mx
import mlx.nn as nn

from mlxcel.checkpoint.headers import TensorHeader
from mlxcel.family.contract import Family
from mlxcel.family.transformer import TransformerStage
from mlxcel.stage.contract import Progress
from mlxcel.stage.cut import Share, cut
from mlxcel.stage.packed import Packed
from mlxcel.stage.scratch import give_back_scratch
from mlxcel.tensor.plan import ShardPlan
from mlxcel.tensor.shard import REPLICATED, Shard, ShardStrategy

_FLOAT32_BYTES = 4


@attrs.frozen
class Shares:
    """What of each parameter goes to the ranks that this worker is.

    Attributes:
        names: Parameters by their names in the stage: their names in the whole model.
        plan: How ranks share them; None where there is only one.
        ranks: Those that this worker is.
        size: How many there are in all.
        cast: The type of floating parameters; None leaves them as they are.
        family: Says which of them are cast.
        stored: Those that are tensors of a file, unchanged, by their names in the whole model.
    """

    names: Mapping[str, str]
    plan: ShardPlan | None
    ranks: range
    size: int
    cast: mx.Dtype | None
    family: Family
    stored: Mapping[str, TensorHeader]

    def shard(self, local: str) -> Shard:
        """How the parameter is split."""
        return REPLICATED if self.plan is None else self.plan.shard_of(self.names[local])

    def of(self, local: str, value: mx.array | Packed) -> list[mx.array | None]:
        """What each of our ranks gets of ``value``, evaluated; None is nothing.

        What is not split they share.
        """
        shard = self.shard(local)
        if shard.strategy is ShardStrategy.REPLICATED and not shard.once:
            return [self._finished(local, value)] * len(self.ranks)
        return [
            None if shard.once and rank else self._cut(local, value, Share(shard, rank, self.size))
            for rank in self.ranks
        ]

    def nbytes(self, local: str, value: mx.array | Packed) -> int:
        """The bytes of what our ranks get together."""
        shard = self.shard(local)
        if shard.once and 0 not in self.ranks:
            return 0
        numbers = math.prod(shard.held(value.shape, self.ranks, self.size))
        if isinstance(value, Packed):
            return numbers * _FLOAT32_BYTES
        dtype = self.cast if self.cast is not None and self._casts(local, value) else value.dtype
        return numbers * dtype.size

    def _cut(self, local: str, value: mx.array | Packed, share: Share) -> mx.array:
        return self._finished(local, cut(self.names[local], value, share, self.stored))

    def _finished(self, local: str, value: mx.array | Packed) -> mx.array:
        if isinstance(value, Packed):
            return value.unpack()
        if self.cast is not None and self._casts(local, value):
            value = value.astype(self.cast)
        mx.eval(value)
        return value

    def _casts(self, local: str, value: mx.array) -> bool:
        return mx.issubdtype(value.dtype, mx.floating) and self.family.casts(self.names[local])


def fill(
    stages: Sequence[TransformerStage],
    own: MutableMapping[str, mx.array | Packed],
    shares: Shares,
    progress: Progress,
) -> None:
    """Read ``own`` into ``stages``, one for each rank; ``own`` is emptied.

    One tensor at a time, so that the peak is one of them above the sum. It counts twice where it
    is put together from several, or cast; of one that ranks share, what they share counts, unless
    it is put together.
    """
    total = sum(shares.nbytes(local, value) for local, value in own.items())
    done = 0
    for group in list(stages[0].parameter_groups()):
        for local in group:
            value = own.pop(local)
            done += shares.nbytes(local, value)
            for stage, share in zip(stages, shares.of(local, value), strict=True):
                _put(stage.model, local, share)
            del value
            # Without this, what it was made of stays in MLX's cache and counts as this stage's.
            give_back_scratch()
        progress(done, total)


def _put(model: nn.Module, local: str, value: mx.array | None) -> None:
    if value is not None:
        model.load_weights([(local, value)], strict=False)
        return
    owner, _, leaf = local.rpartition(".")
    module = model
    for step in owner.split("."):
        module = module[int(step)] if step.isdecimal() else module[step]
    module.pop(leaf)
