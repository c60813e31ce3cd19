"""Ranks equal the whole model, for every family that ranks can share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import mlx.core as mx
import pytest

from mlxcel.checkpoint.headers import TensorHeader
from mlxcel.family import Batching, Family
from mlxcel.family.transformer import TransformerStage, flat_parameters
from mlxcel.stage import fill
from mlxcel.stage.cut import Share, cut
from mlxcel.stage.load import load_stage
from mlxcel.stage.packed import Packed
from mlxcel.tensor.options import TensorParallel
from mlxcel.tensor.shard import ShardStrategy
from mlxcel.testing.quick import quick
from mlxcel.testing.split import (
    Chain,
    Scene,
    differences,
    drawn_cut,
    every_cut,
    one_stage,
)
from mlxcel.testing.thread_collectives import ThreadCollectives
from mlxcel.testing.tiny import models

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]

NAMES = models()
UNLIKE = ("llama", "mixtral", "gemma4", "qwen3_5", "jamba", "deepseek_v3", "kimi_k3")
"""What differs in what is shared out."""

TOLERANCE = 1e-3
"""Of logits that go up to about ten."""

WHOLE_EXPERTS = TensorParallel(2)
EVERYTHING = TensorParallel(
    2, moe="within_expert", embedding="vocab_parallel", head="vocab_parallel"
)
VOCABULARY = attrs.evolve(WHOLE_EXPERTS, embedding="vocab_parallel", head="vocab_parallel")
OTHERS = (
    attrs.evolve(WHOLE_EXPERTS, size=4),
    attrs.evolve(EVERYTHING, size=4),
    attrs.evolve(WHOLE_EXPERTS, moe="within_expert"),
    VOCABULARY,
)


def scene_of(path: Path, family: Family) -> Scene:
    """A ragged batch, rows leave and join it; an even one where the family asks for that."""
    if family.batching(family.open(path).config) is Batching.PADDED:
        return Scene((17, 5, 11), chunk=8, steps=6)
    return Scene((11, 11, 11), chunk=8, steps=6)


def unlike_the_whole(
    path: Path, family: Family, ranges: tuple[range, ...], tensor: TensorParallel
) -> list[str]:
    split = Chain(path, family, ranges, tensor=tensor)
    scene = scene_of(path, family)
    return list(differences(one_stage(path, family), split, scene, TOLERANCE))


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(tiny: Tiny, family_of: FamilyOf, name: str) -> None:
    """In float32, cut at every boundary, with whole experts: the logits and the greedy tokens."""
    path = tiny(name)
    family = family_of(path)
    assert unlike_the_whole(path, family, every_cut(path, family), WHOLE_EXPERTS) == []


@pytest.mark.parametrize("name", quick(NAMES, UNLIKE))
def test_two_ranks_of_packed_weights(tiny: Tiny, family_of: FamilyOf, name: str) -> None:
    """With 4 bits, as one stage, with all that ranks can share shared out."""
    path = tiny(name, quantize="4:32")
    family = family_of(path)
    layers = range(family.open(path).config.num_layers)
    assert unlike_the_whole(path, family, (layers,), EVERYTHING) == []


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "4:32"])
@pytest.mark.parametrize("name", NAMES)
def test_other_sizes_and_modes(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None
) -> None:
    """So do four ranks, where that is legal, and two in the other modes, in drawn stages."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    most = len(every_cut(path, family))
    for tensor in OTHERS if quantize is None else OTHERS[1::2]:
        if tensor.size in legal_sizes(path, family, tensor):
            ranges = drawn_cut(path, family, min(3, most), seed=tensor.size)
            assert unlike_the_whole(path, family, ranges, tensor) == [], tensor


def legal_sizes(path: Path, family: Family, tensor: TensorParallel) -> list[int]:
    checkpoint = family.open(path)
    plan = family.shard_plan(checkpoint.config, tensor)
    if checkpoint.quantization is not None:
        plan = attrs.evolve(plan, groups=dict.fromkeys(plan.parameters, 32))
    return [size for size in (2, 4) if plan.divides(size)]


@pytest.mark.parametrize("quantize", [None, "4:32"])
@pytest.mark.parametrize("name", ["gemma3", "llama", "llama_tied", "qwen3_moe"])
def test_a_shared_vocabulary_changes_no_bit(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None
) -> None:
    """Logits that ranks make side by side are those that each makes alone."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    layers = [range(family.open(path).config.num_layers)]
    replicated, shared = (
        Chain(path, family, layers, tensor=tensor) for tensor in (WHOLE_EXPERTS, VOCABULARY)
    )
    assert list(differences(replicated, shared, Scene((17, 5, 11), steps=3))) == []


def test_half_precision(tiny: Tiny, family_of: FamilyOf) -> None:
    """In bfloat16 sums round elsewhere: logits are as near as those of float32 are."""
    path = tiny("llama", dtype="bfloat16")
    family = family_of(path)
    layers = [range(family.open(path).config.num_layers)]
    split = Chain(path, family, layers, tensor=WHOLE_EXPERTS)
    found = differences(one_stage(path, family), split, Scene((17, 5, 11)), 1.0)
    assert [difference for difference in found if "greedy" not in difference] == []


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_rank(tiny: Tiny, family_of: FamilyOf, name: str) -> None:
    """A rank holds its half of what is shared out, and what is replicated, and 5 % at most more."""
    path = tiny(name)
    family = family_of(path)
    whole = loaded(path, family)
    plan = family.shard_plan(family.open(path).config, EVERYTHING)
    replicated = sum(
        value.nbytes
        for name, value in flat_parameters(whole.model).items()
        if plan.shard_of(name).strategy is ShardStrategy.REPLICATED
    )
    assert replicated < whole.nbytes()
    planned = replicated + (whole.nbytes() - replicated) / 2
    for collectives in ThreadCollectives.group(2):
        assert loaded(path, family, collectives).nbytes() <= 1.05 * planned


def loaded(
    path: Path, family: Family, collectives: ThreadCollectives | None = None
) -> TransformerStage:
    checkpoint = family.open(path)
    layers = checkpoint.config.num_layers
    if collectives is None:
        return load_stage(checkpoint, family, 0, layers, None)
    ranks = range(collectives.rank, collectives.rank + 1)
    options = {"tensor": EVERYTHING, "ranks": ranks, "collectives": collectives}
    return load_stage(checkpoint, family, 0, layers, None, **options)  # type: ignore[arg-type]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, bool]]:
    """Each share that was loaded: its name, whether it was read from a file, whether right."""
    seen: list[tuple[str, bool, bool]] = []

    def both(
        name: str, value: mx.array | Packed, share: Share, stored: Mapping[str, TensorHeader]
    ) -> mx.array | Packed:
        read, taken = cut(name, value, share, stored), cut(name, value, share, {})
        pairs = list(zip(arrays(read), arrays(taken), strict=True))
        equal = all(a.dtype == b.dtype and mx.array_equal(a, b).item() for a, b in pairs)
        seen.append((name, name in stored, equal))
        return read

    monkeypatch.setattr(fill, "cut", both)
    return seen


def arrays(value: mx.array | Packed) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
        return
    parts = (value.weight, value.scales, value.biases, value.global_scale)
    yield from (part for part in parts if part is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "dequantize"), [(None, False), ("4:32", False), ("4:32", True)]
)
@pytest.mark.parametrize("name", NAMES)
def test_shares_read_from_files(
    tiny: Tiny,
    family_of: FamilyOf,
    compared: list[tuple[str, bool, bool]],
    name: str,
    quantize: str | None,
    dequantize: bool,
) -> None:
    """They are what would be cut out of the whole tensors, after all that a family does to them."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    layers = [range(family.open(path).config.num_layers)]
    Chain(path, family, layers, tensor=EVERYTHING, dequantize=dequantize)
    assert [name for name, _, equal in compared if not equal] == []
    assert any(stored for _, stored, _ in compared)


def test_most_shares_are_read_from_files(
    tiny: Tiny, family_of: FamilyOf, compared: list[tuple[str, bool, bool]]
) -> None:
    """Whole tensors are read only where a family changes them."""
    for name, changed in (("llama", ()), ("mixtral", ("switch_mlp",))):
        path = tiny(name)
        Chain(path, family_of(path), every_cut(path, family_of(path)), tensor=EVERYTHING)
        taken = {name for name, stored, _ in compared if not stored}
        assert all(any(part in name for part in changed) for name in taken)
        compared.clear()
