"""Layer ranges given by hand."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.errors import PartitionError
from mlxcel.family.contract import LayerAdjacencyGroup
from mlxcel.partition.ranges import (
    format_layers,
    format_ranges,
    legal_cuts,
    parse_ranges,
    validate_ranges,
)


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("0-19,20-39", (range(20), range(20, 40))),
        ("0-19, 20", (range(20), range(20, 21))),
        (" 0 - 1 ,2", (range(2), range(2, 3))),
        ("0", (range(1),)),
    ],
)
def test_ranges_are_inclusive_text(text: str, ranges: tuple[range, ...]) -> None:
    """Both ends of a written range belong to it; a single layer stands alone."""
    assert parse_ranges(text) == ranges


@pytest.mark.parametrize(
    "text",
    ["", ",", "0-19,", "0-19;20-39", "a-b", "-3", "0--3", "0-1-2", "5-3", "1.5", "٣", "9" * 99],
)
def test_other_text_is_refused_with_the_right_form(text: str) -> None:
    """Whatever is no list of ranges gets an error that shows the flag and its form."""
    with pytest.raises(PartitionError, match="--pp-layers 0-19,20-39"):
        parse_ranges(text)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_format_is_the_inverse_of_parse(sizes: list[int]) -> None:
    """Formatted ranges read back as the same ranges."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    ranges = tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))
    assert parse_ranges(format_ranges(ranges)) == ranges
    validate_ranges(ranges, ends[-1])


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        ([range(5), range(6, 10)], "layer 5 is missing before stage 1"),
        ([range(1, 10)], "layer 0 is missing before stage 0"),
        ([range(5), range(4, 10)], "stage 1 begins at layer 4"),
        ([range(5), range(5, 9)], "layer 9 is missing"),
        ([range(5), range(5, 11)], "no layer 10"),
        ([range(5), range(5, 5), range(5, 10)], "stage 1 has no layer"),
        ([range(5, 10), range(5)], "layers 0-4 are missing before stage 0"),
        ([], "layers 0-9 are missing"),
    ],
)
def test_ranges_must_tile_the_layers(ranges: list[range], problem: str) -> None:
    """Every layer stands exactly once, in order; the error names the layer that does not."""
    with pytest.raises(PartitionError, match=problem):
        validate_ranges(ranges, 10)


GROUPS = (
    LayerAdjacencyGroup(2, 5, "layer 4 reads the keys of layer 2"),
    LayerAdjacencyGroup(3, 7, "layer 6 reads the keys of layer 3"),
)


def test_legal_cuts_divide_no_group() -> None:
    """A stage may begin where no group is divided, its first layer included."""
    assert legal_cuts(10, GROUPS) == (1, 2, 7, 8, 9)
    assert legal_cuts(4, ()) == (1, 2, 3)
    assert legal_cuts(1, ()) == ()


def test_a_cut_group_is_refused_by_name() -> None:
    """The error gives the group's source, consumer and reason, and the nearest legal cuts."""
    with pytest.raises(PartitionError) as error:
        validate_ranges([range(4), range(4, 10)], 10, GROUPS)
    text = str(error.value)
    assert "source layer 2 and consumer layer 4" in text
    assert "layer 4 reads the keys of layer 2" in text
    assert "layer 2 or layer 7" in text


def test_a_model_that_is_one_group_has_no_cut() -> None:
    """Where no cut is legal, the error says to use one stage."""
    with pytest.raises(PartitionError, match="one stage"):
        validate_ranges([range(4), range(4, 9)], 9, [LayerAdjacencyGroup(0, 9, "all share")])


@given(st.integers(1, 10), st.data())
def test_ranges_at_legal_cuts_are_accepted(num_layers: int, data: st.DataObject) -> None:
    """Any set of legal cuts makes valid ranges."""
    cuts = data.draw(st.sets(st.sampled_from([0, *legal_cuts(num_layers, GROUPS)])))
    ends = [*sorted(cuts | {0}), num_layers]
    ranges = [range(a, b) for a, b in pairwise(ends)]
    validate_ranges(ranges, num_layers, GROUPS)


@pytest.mark.parametrize(
    ("layers", "text"), [([], ""), ([4], "4"), ([0, 1, 2, 7], "0-2,7"), ([3, 5, 6], "3,5-6")]
)
def test_layers_as_text(layers: list[int], text: str) -> None:
    """Neighbouring layers are written as one range."""
    assert format_layers(layers) == text
