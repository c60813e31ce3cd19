"""What one worker holds of a model that several ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.family.contract import Family
from mlxcel.partition.from_config import headers_of
from mlxcel.partition.profile import LayerProfile, ModelProfile, profile_checkpoint
from mlxcel.partition.rank_plan import RankPlan

if TYPE_CHECKING:
    from mlxcel.checkpoint.checkpoint import Checkpoint


def profile_ranks(
    whole: ModelProfile,
    checkpoint: Checkpoint,
    family: Family,
    dtype: DtypeChoice,
    ranks: RankPlan,
    *,
    dequantize: bool = False,
) -> ModelProfile:
    """The profile of one worker, where ``whole`` is that of all of the model.

    A worker that is one rank counts as the first one, which holds the most. What share of each
    layer it holds follows from the parameters as the family lists them; the bytes stay those of
    the checkpoint.

    Args:
        dtype, dequantize: As for :func:`mlxcel.partition.profile.profile_checkpoint`.
    """

    def listed(held: range | None) -> ModelProfile:
        shapes = (
            p if held is None else attrs.evolve(p, shape=p.shard.held(p.shape, held, ranks.size))
            for p in ranks.shards.parameters.values()
        )
        headers = headers_of(shapes, checkpoint.config, family, ranks.packed)
        listed = attrs.evolve(checkpoint, tensors=headers, loaded=headers)
        return profile_checkpoint(listed, family, dtype, dequantize=dequantize)

    return _scaled(whole, listed(ranks.held), listed(None))


def _scaled(profile: ModelProfile, part: ModelProfile, whole: ModelProfile) -> ModelProfile:
    """``profile``, each of its figures by as much as ``part`` differs from ``whole``."""

    def scaled(figure: str) -> int:
        return _share(*(getattr(each, figure) for each in (profile, part, whole)))

    return attrs.evolve(
        profile,
        layers=tuple(
            LayerProfile(_share(a.bytes, b.bytes, c.bytes), _share(a.work, b.work, c.work))
            for a, b, c in zip(profile.layers, part.layers, whole.layers, strict=True)
        ),
        embedding_bytes=scaled("embedding_bytes"),
        embedding_work=scaled("embedding_work"),
        head_bytes=scaled("head_bytes"),
        head_work=scaled("head_work"),
        shared_bytes=scaled("shared_bytes"),
    )


def _share(value: int, part: int, whole: int) -> int:
    return value * part // whole if whole else value
