"""What the operator says about ranks: how many share a stage, and what of it they share out."""

from __future__ import annotations

from typing import Literal

import attrs

MoeMode = Literal["expert_parallel", "within_expert"]
"""Whole experts on each rank, or a share of every expert."""

VocabMode = Literal["replicated", "vocab_parallel"]
"""All of the vocabulary on each rank, or a share of it."""

MOST_RANKS = 256
"""No stage is shared by more: what ranks tell of each other has a byte for the rank."""


@attrs.frozen
class TensorParallel:
    """Tensor parallelism: every stage is shared by ``size`` ranks.

    Attributes:
        size: Ranks of a stage; 1 is no tensor parallelism.
        moe: How they share out the experts of a mixture.
        embedding, head: How they share out the token embedding and the output projection.
    """

    size: int = 1
    moe: MoeMode = "expert_parallel"
    embedding: VocabMode = "replicated"
    head: VocabMode = "replicated"


ALONE = TensorParallel()
"""No tensor parallelism."""
