"""The share of a rank in one parameter."""

from __future__ import annotations

import pytest

from mlxcel.tensor.shard import REPLICATED, VOCAB, Shard, ShardStrategy, column, row


def test_any_cut() -> None:
    """Without units an axis is cut wherever it divides."""
    shard = column()
    assert [shard.parts(6, rank, 2) for rank in range(2)] == [(range(0, 3),), (range(3, 6),)]
    assert shard.divides(6, 3)
    assert not shard.divides(6, 4)


def test_heads_are_not_divided() -> None:
    """Ranks share units, whatever the size of the axis would allow."""
    shard = row(units=3)
    assert not shard.divides(12, 2)
    assert [shard.parts(12, rank, 3) for rank in range(3)] == [
        (range(0, 4),),
        (range(4, 8),),
        (range(8, 12),),
    ]


def test_segments_are_cut_one_by_one() -> None:
    """A fused projection gives each rank a piece of each of its parts."""
    shard = column(units=2, segments=(4, 4, 8))
    assert shard.parts(16, 0, 2) == (range(0, 2), range(4, 6), range(8, 12))
    assert shard.parts(16, 1, 2) == (range(2, 4), range(6, 8), range(12, 16))
    assert not shard.divides(16, 4)


@pytest.mark.parametrize(("ranks", "heads"), [(2, [0, 1]), (4, [0, 0, 1, 1])])
def test_ranks_share_a_head(ranks: int, heads: list[int]) -> None:
    """With fewer heads of keys than ranks, neighbours have the same one."""
    shard = column(units=2, repeats=True)
    found = [shard.parts(16, rank, ranks) for rank in range(ranks)]
    assert found == [(range(8 * head, 8 * head + 8),) for head in heads]
    assert not shard.divides(16, 3)


@pytest.mark.parametrize(
    ("shard", "bias"),
    [
        (column(4, counted=("heads",)), column(4, axis=-1)),
        (column(4, axis=-3), column(4, axis=-2)),
        (column(segments=(2, 6)), column(axis=-1, segments=(2, 6))),
        (row(4), Shard(once=True)),
        (REPLICATED, Shard(axis=-1)),
    ],
)
def test_biases(shard: Shard, bias: Shard) -> None:
    """A bias goes with the outputs; that of what is added is added once."""
    assert shard.of_bias() == bias


def test_the_vocabulary() -> None:
    """A table is shared out by its rows."""
    assert (VOCAB.strategy, VOCAB.axis) == (ShardStrategy.VOCAB, -2)


@pytest.mark.parametrize(
    ("shard", "one", "two", "all_four"),
    [
        (REPLICATED, (8, 6), (8, 6), (8, 6)),
        (Shard(once=True), (8, 6), (8, 6), (8, 6)),
        (column(), (2, 6), (4, 6), (8, 6)),
        (column(2, repeats=True), (4, 6), (8, 6), (16, 6)),
        (Shard(ShardStrategy.ROW, -2), (2, 6), (4, 6), (8, 6)),
        (Shard(ShardStrategy.VOCAB, -1), (8, 1), (8, 3), (8, 6)),
        (Shard(ShardStrategy.EXPERT, 0), (2, 6), (4, 6), (8, 6)),
    ],
)
def test_what_ranks_hold(
    shard: Shard, one: tuple[int, ...], two: tuple[int, ...], all_four: tuple[int, ...]
) -> None:
    """What is replicated a worker has once, however many ranks it is; repeated units each has."""
    found = [shard.held((8, 6), range(ranks), 4) for ranks in (1, 2, 4)]
    assert found == [one, two, all_four]


def test_groups_bind_inputs_only() -> None:
    """A group lies along the inputs: cutting the outputs divides none."""
    assert column().divides(128, 4, group=64)
    assert row().divides(128, 2, group=64)
    assert not row().divides(128, 4, group=64)
    assert not row(4).divides(2, 4)  # of four heads there are only two groups
