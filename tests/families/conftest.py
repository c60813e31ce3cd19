"""What the tests of every family share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from mlxcel.errors import PartitionError
from mlxcel.family import LayerAdjacencyGroup
from mlxcel.partition.ranges import legal_cuts, validate_ranges


def three_stages(
    num_layers: int, groups: Sequence[LayerAdjacencyGroup], seed: str
) -> tuple[range, ...]:
    """A partition into three stages at legal cuts, drawn anew for each ``seed``."""
    cuts = sorted(random.Random(seed).sample(legal_cuts(num_layers, groups), 2))
    return tuple(range(a, b) for a, b in itertools.pairwise([0, *cuts, num_layers]))


def assert_illegal_cuts_are_refused(
    num_layers: int, groups: Sequence[LayerAdjacencyGroup]
) -> None:
    """Every cut is legal, or refused with source and consumer of a group that it divides."""
    for cut in range(1, num_layers):
        divided = [group for group in groups if group.cut_by(cut)]
        ranges = (range(cut), range(cut, num_layers))
        if not divided:
            validate_ranges(ranges, num_layers, groups)
            continue
        with pytest.raises(PartitionError) as caught:
            validate_ranges(ranges, num_layers, groups)
        text = str(caught.value)
        assert any(
            f"source layer {group.start} and consumer layer {group.end - 1}" in text
            for group in divided
        ), text
