"""The connections for data of every place in a cluster."""

from __future__ import annotations

import pytest

from mlxcel.cluster.links import engine_links, links_of

SIZES = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (2, 4), (3, 5)]


@pytest.mark.parametrize(
    ("place", "incoming", "outgoing"),
    [
        ((0, 0, 1, 1), {"engine-0", "0-engine"}, set()),
        ((0, 0, 2, 1), {"engine-0"}, {"0-1"}),
        ((1, 0, 3, 1), {"0-1"}, {"1-2"}),
        ((2, 0, 3, 1), {"1-2", "2-engine"}, set()),
        ((0, 0, 2, 2), {"engine-s0r0"}, {"s0r0-s0r1", "s0r0-s1r0"}),
        ((0, 1, 2, 2), {"s0r0-s0r1"}, {"s0r1-s1r1"}),
        ((1, 0, 2, 2), {"s0r0-s1r0", "s1r0-engine"}, {"s1r0-s1r1"}),
        ((1, 1, 2, 2), {"s0r1-s1r1", "s1r0-s1r1"}, set()),
    ],
)
def test_the_links_of_a_place(
    place: tuple[int, int, int, int], incoming: set[str], outgoing: set[str]
) -> None:
    """Each dials its next stage and the higher ranks of its own; the engine only ranks 0."""
    links = links_of(*place)
    assert {link.name for link in links if link.to is None} == incoming
    assert {link.name for link in links if link.to is not None} == outgoing


@pytest.mark.parametrize(("stages", "ranks"), SIZES)
def test_every_link_has_two_ends(stages: int, ranks: int) -> None:
    """What one node dials the other one waits for, from there and in the same class of traffic;
    what nobody dials is the engine's."""
    places = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
    awaited = {
        (place, link.name): link
        for place in places
        for link in links_of(*place, stages, ranks)
        if link.to is None
    }
    for place in places:
        for link in links_of(*place, stages, ranks):
            if link.to is not None:
                other = awaited.pop((link.to, link.name))
                assert other.traffic == link.traffic
                assert (link.traffic == "tp_collective") == (link.to[0] == place[0])
                ends = (link.direction, other.direction)
                assert ends in (("send", "receive"), ("group", "group"))
                if link.direction == "group":
                    assert (link.rank, other.rank) == (link.to[1], place[1])
    there, back = engine_links(stages, ranks)
    assert set(awaited) == {((0, 0), there), ((stages - 1, 0), back)}


@pytest.mark.parametrize(("stages", "ranks"), SIZES)
def test_names_are_of_one_link_each(stages: int, ranks: int) -> None:
    """No two connections of a cluster share a name."""
    dialled = [
        link.name
        for stage in range(stages)
        for rank in range(ranks)
        for link in links_of(stage, rank, stages, ranks)
        if link.to is not None
    ]
    assert len(set(dialled)) == len(dialled)
