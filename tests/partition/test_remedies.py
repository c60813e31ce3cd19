"""What is said to help does help."""

from __future__ import annotations

from mlxcel.family.contract import LayerAdjacencyGroup
from mlxcel.partition.profile import LayerProfile, ModelProfile
from mlxcel.partition.remedies import Wording, remedies


def of(count: int, kv_bytes: int = 0) -> ModelProfile:
    """Layers of 100 bytes and their caches."""
    return ModelProfile((LayerProfile(100, 1, kv_bytes),) * count)


def test_more_stages_of_one_size_are_counted() -> None:
    """With equal stages, the least number of them that is enough."""
    assert list(remedies(of(10), [200, 200], quantized=True)) == [
        "5 stages of this size (--pp-size 5)"
    ]


def test_more_stages_of_several_sizes_are_not() -> None:
    """Where sizes differ, nobody knows what another stage would have."""
    assert list(remedies(of(10), [200, 300], quantized=True)) == ["more stages"]


def test_more_ranks_are_offered_where_they_are_enough() -> None:
    """Beside more stages, as either alone helps."""
    assert list(remedies(of(10), [200, 200], quantized=True, ranks=4)) == [
        "5 stages of this size (--pp-size 5)",
        "4 ranks a stage (--tp-size 4)",
    ]


def test_remedies_are_told_in_the_operators_words() -> None:
    """Whoever has other flags, or a file, hears of those."""
    wording = Wording("stages = {}", "ranks = {}", "a smaller ctx")
    assert list(remedies(of(4, 50), [500], quantized=True, ranks=2, wording=wording)) == [
        "2 stages of this size (stages = 2)",
        "2 ranks a stage (ranks = 2)",
        "a smaller ctx",
    ]


def test_more_stages_are_no_help_for_a_layer_too_large() -> None:
    """A single layer that does not fit needs another machine."""
    [remedy] = remedies(of(10), [99, 99], quantized=True)
    assert "more of this size are not enough" in remedy


def test_a_model_that_cannot_be_cut_further() -> None:
    """Where every piece has a stage already, more stages are not offered."""
    profile = ModelProfile(of(4).layers, groups=(LayerAdjacencyGroup(0, 3, "joined"),))
    assert list(remedies(profile, [200, 200], quantized=True)) == []


def test_another_division() -> None:
    """Where the balancer finds a division that fits, it is offered instead of one by hand."""
    found = list(remedies(of(10), [500, 500], quantized=True))
    assert found[0] == "another division of the layers (leave --pp-layers out)"


def test_fewer_tokens_help_where_caches_are_the_trouble() -> None:
    """It says so if the caches alone are too much, and if they are not the only trouble."""
    [_, remedy] = remedies(of(4, kv_bytes=50), [200, 250], quantized=True)
    assert remedy == "fewer --sequences or a shorter --context"
    [_, remedy] = remedies(of(4, kv_bytes=50), [150, 150], quantized=True)
    assert remedy == "fewer --sequences or a shorter --context, though not alone"


def test_quantized_weights_help_those_that_are_not() -> None:
    """Plain weights can be quantized."""
    assert list(remedies(of(10), [200, 300], quantized=False)) == [
        "more stages",
        "quantized weights",
    ]
