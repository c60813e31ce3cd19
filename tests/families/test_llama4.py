"""The Llama 4 family: chunked attention in batches, fused experts, tensors nobody reads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import attrs
import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.config import read_config
from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.errors import CheckpointError
from mlxcel.family import Family, Part, Place
from mlxcel.family.caches import KVCacheKind
from mlxcel.family.choose import choose_family, known_distributions
from mlxcel.family.transformer import Mask, flat_parameters
from mlxcel.partition.profile import profile_checkpoint
from mlxcel.plugins import Plugins
from mlxcel.testing import tiny as checkpoints
from mlxcel.testing.split import (
    SCENES,
    Chain,
    Scene,
    Whole,
    check_split,
    differences,
    drawn_cut,
    every_cut,
    one_stage,
    unlike_alone,
)

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]

CHUNK = 8  # attention_chunk_size of the tiny checkpoints
RAGGED = Scene((17, 5, 11))
TOLERANCE = 1e-5
every_quantization = pytest.mark.parametrize("quantize", [None, "4:32"])


@pytest.mark.parametrize("name", ["llama4", "llama4_vlm"])
@every_quantization
def test_split_at_every_layer(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None
) -> None:
    """Cut at every boundary, every logit is the uncut model's to the last bit."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    assert len(every_cut(path, family)) == 8
    assert check_split(path, family, scenes=[*SCENES, Scene((29, 9))], reference=one_stage) == []


@every_quantization
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_split_into_three(tiny: Tiny, family_of: FamilyOf, quantize: str | None, seed: int) -> None:
    """So is every partition into stages of several layers."""
    path = tiny("llama4", quantize=quantize)
    family = family_of(path)
    ranges = drawn_cut(path, family, 3, seed)
    assert check_split(path, family, ranges, scenes=[RAGGED], reference=one_stage) == [], ranges


def test_split_in_bfloat16(tiny: Tiny, family_of: FamilyOf) -> None:
    """Half precision, which a CPU has for packed experts only, is no less identical."""
    path = tiny("llama4", quantize="4:32", dtype="bfloat16")
    assert check_split(path, family_of(path), scenes=[RAGGED], reference=one_stage) == []


def test_a_stage_of_chunked_layers_only(tiny: Tiny, family_of: FamilyOf) -> None:
    """A stage without any full attention runs like the others, and one with nothing else."""
    path = tiny("llama4")
    family = family_of(path)
    ranges = [range(3), range(3, 4), range(4, 7), range(7, 8)]
    chain = Chain(path, family, ranges)
    assert [set(stage.masks) for stage in chain.stages] == [
        {Mask("chunk", CHUNK)},
        {Mask("full")},
    ] * 2
    assert list(differences(one_stage(path, family), chain, RAGGED)) == []


# Against mlx-lm's own chunks


@every_quantization
@pytest.mark.parametrize(
    "scene", [Scene((1,), steps=7), Scene((3,), steps=5), Scene((8,), steps=0)]
)
def test_within_a_chunk(
    tiny: Tiny, family_of: FamilyOf, quantize: str | None, scene: Scene
) -> None:
    """As long as mlx-lm drops nothing, logits are the same to the last bit."""
    path = tiny("llama4", quantize=quantize)
    family = family_of(path)
    assert check_split(path, family, scenes=[scene]) == []


@pytest.mark.parametrize("quantize", [None, pytest.param("4:32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk", [2048, 8, 7, 3])
def test_across_chunks(tiny: Tiny, family_of: FamilyOf, quantize: str | None, chunk: int) -> None:
    """A chunk ends in the prefill, at its edge or in decoding: the same tokens as mlx-lm's.

    mlx-lm has dropped columns that are masked here, so a sum may be rounded differently.
    """
    path = tiny("llama4", quantize=quantize)
    family = family_of(path)
    chain = Chain(path, family, every_cut(path, family))
    for length in (7, 8, 9, 16, 17, 40):
        scene = Scene((length,), chunk=chunk, steps=20)
        assert list(differences(Whole(path, family), chain, scene, TOLERANCE)) == [], scene


LENGTHS = [(17, 5, 11), (5, 17, 11), (1, 12, 5), (1, 1), (9, 8, 7), (40, 3, 22)]
CHUNKS = [2048, 8, 4, 3]
BATCHES = [  # each with one size of chunks quickly, with all of them slowly
    pytest.param(lengths, chunk, marks=[] if i % 4 == j else pytest.mark.slow)
    for i, lengths in enumerate(LENGTHS)
    for j, chunk in enumerate(CHUNKS)
]


@pytest.mark.parametrize(("lengths", "chunk"), BATCHES)
def test_rows_of_a_batch_are_single_runs(
    tiny: Tiny, family_of: FamilyOf, lengths: tuple[int, ...], chunk: int
) -> None:
    """Each row has chunks and temperatures of its own: it is mlx-lm's run of its prompt alone."""
    path = tiny("llama4")
    family = family_of(path)
    chain = Chain(path, family, every_cut(path, family))
    scene = Scene(lengths, chunk=chunk, steps=20)
    assert list(unlike_alone(chain, Whole(path, family), scene, TOLERANCE)) == []


def test_mask_of_chunks() -> None:
    """A row sees what is before it in its own chunk, counted from its own first token."""
    padding, before, length = [0, 3, 9, 11], 11, 6
    cache = KVCache.merge([cache_of(before - pad) for pad in padding])
    mask = Mask("chunk", CHUNK).make(mx.zeros((4, length, 1)), cache)
    assert mask.shape == (4, 1, length, before + length)
    for row, pad in enumerate(padding):
        for i, j in itertools.product(range(length), range(before + length)):
            query, key = before + i - pad, j - pad
            sees = 0 <= key <= query and key // CHUNK == query // CHUNK
            assert mask[row, 0, i, j].item() is sees, (row, query, key)


def test_mask_of_chunks_for_one_sequence() -> None:
    """One sequence alone sees the same as its row in a batch."""
    for before, length in ((0, 1), (0, 20), (7, 1), (8, 1), (5, 6)):
        h = mx.zeros((1, length, 1))
        alone = Mask("chunk", CHUNK).make(h, cache_of(before))
        padded = Mask("chunk", CHUNK).make(mx.zeros((2, length, 1)), batch_of(before, before + 2))
        assert mx.array_equal(alone[0], padded[0, :, :, 2:]).item()
        assert not padded[0, :, :, :2].any().item()


def cache_of(length: int) -> KVCache:
    cache = KVCache()
    if length:
        cache.update_and_fetch(mx.zeros((1, 1, length, 1)), mx.zeros((1, 1, length, 1)))
    return cache


def batch_of(*lengths: int) -> object:
    return KVCache.merge([cache_of(length) for length in lengths])


# What is read and planned


def test_what_is_never_read(tiny: Tiny, family_of: FamilyOf, plugins: Plugins) -> None:
    """The vision tower is in no stage; the logits are those of the text tower."""
    path = tiny("llama4_vlm")
    name, family = choose_family(read_config(path), plugins)
    assert name == "llama4"
    checkpoint = family.open(path)
    unused = checkpoint.tensors.keys() - checkpoint.loaded.keys()
    assert {name.split(".")[0] for name in unused} == {"vision_model", "multi_modal_projector"}
    chain = Chain(path, family, every_cut(path, family))
    for stage in chain.stages:
        for parameter, value in flat_parameters(stage.model).items():
            assert not mx.isnan(value).any().item(), parameter
    text = one_stage(tiny("llama4"), family)
    assert list(differences(text, chain, RAGGED)) == []


def test_another_model_under_the_text_models_name(family_of: FamilyOf, tiny: Tiny) -> None:
    """``llama4_text`` is a dense model of mlx-lm's, so this family does not claim the name."""
    family = family_of(tiny("llama4"))
    assert "llama4_text" not in (*family.wire_names, *family.model_types)
    assert "llama4_text" not in known_distributions()


def test_shapes(tiny: Tiny, family_of: FamilyOf) -> None:
    """Every parameter of mlx-lm's model is foretold from config.json, and what is packed."""
    path = tiny("llama4")
    family = family_of(path)
    shapes = list(family.shapes(family.open(path).config))
    model = checkpoints.draw_model("llama4")
    drawn = {path: value.shape for path, value in flat_parameters(model).items()}
    assert {shape.name: shape.shape for shape in shapes} == drawn
    assert len(shapes) == len(drawn)
    modules = dict(model.named_modules())
    for shape in shapes:
        module, _, leaf = shape.name.rpartition(".")
        assert shape.packs is (leaf == "weight" and hasattr(modules[module], "to_quantized"))


def test_caches(tiny: Tiny, family_of: FamilyOf) -> None:
    """Every layer keeps the keys and values of the whole context."""
    path = tiny("llama4")
    family = family_of(path)
    [stage] = one_stage(path, family).stages
    caches = stage.make_caches()
    stage({"tokens": mx.array([list(range(3 * CHUNK))])}, caches)
    kinds = family.caches(family.open(path).config)
    for kind, cache in zip(kinds, caches, strict=True):
        assert isinstance(kind, KVCacheKind) and cache is not None
        keys, values = cache.keys_and_values()
        assert keys.shape == (1, kind.heads, 3 * CHUNK, kind.key_dim)
        assert values.shape == (1, kind.heads, 3 * CHUNK, kind.value_dim)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("interleave_moe_layer_step", 0),
        ("num_key_value_heads", 3),
        ("intermediate_size_mlp", None),
        ("num_local_experts", "four"),
        ("attention_bias", 1),
    ],
)
def test_wrong_configs(
    tiny: Tiny, tmp_path: Path, family_of: FamilyOf, field: str, value: object
) -> None:
    """A config that contradicts itself is refused with the field's name."""
    config = json.loads((tiny("llama4") / "config.json").read_text())
    config["text_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    family = family_of(tmp_path)
    with pytest.raises(CheckpointError, match=field):
        list(family.shapes(read_config(tmp_path)))


@pytest.mark.parametrize("size", [0, None, 8.5])
def test_chunks_without_a_size(tiny: Tiny, family_of: FamilyOf, size: object) -> None:
    """A chunk size that none can be cut by is refused before anything runs."""
    path = tiny("llama4")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["attention_chunk_size"] = size
    settings = read_config(path)
    family = family_of(path)
    wrong = attrs.evolve(settings, raw=config, text=config["text_config"])
    with pytest.raises(CheckpointError, match="attention_chunk_size"):
        family.stage_class().build_model(wrong)


@pytest.mark.parametrize("quantize", [None, "4:32", "4:32:mxfp4"])
def test_bytes(
    tiny: Tiny,
    family_of: FamilyOf,
    assert_planned_bytes: Callable[[Checkpoint, Family, str | None], None],
    quantize: str | None,
    stored_and_cast: tuple[str, str | None],
) -> None:
    """The profile's bytes are those of the loaded model."""
    dtype, cast = stored_and_cast
    path = tiny("llama4_vlm", quantize=quantize, dtype=dtype)
    assert_planned_bytes(family_of(path).open(path), family_of(path), cast)


def test_work_counts_the_expert_of_a_token(tiny: Tiny, family_of: FamilyOf) -> None:
    """Of four experts a token passes one, and always the shared one."""
    hub, converted = tiny("llama4"), tiny("llama4", quantize="4:32")
    family = family_of(hub)
    config = family.open(hub).config
    module = "language_model.model.layers.1.feed_forward"
    for name in ("experts.gate_up_proj", "experts.down_proj", "experts.up_proj.weight"):
        assert family.touched(f"{module}.{name}", config) == 0.25
        assert family.place(f"{module}.{name}", config) == Place(Part.LAYER, 1)
    for name in ("shared_expert.up_proj.weight", "router.weight"):
        assert family.touched(f"{module}.{name}", config) == 1
    as_stored = DtypeChoice(None, "")
    first, second = (
        profile_checkpoint(family.open(p), family, as_stored) for p in (hub, converted)
    )
    assert [layer.work for layer in first.layers] == [layer.work for layer in second.layers]


# Greedy tokens


@every_quantization
def test_generate(
    tiny: Tiny, assert_greedy_parity: Callable[[Path, str], None], quantize: str | None
) -> None:
    """mlxcel generate gives mlx-lm's greedy tokens, a ragged batch those of single runs."""
    assert_greedy_parity(tiny("llama4", quantize=quantize), "0-2,3-4,5-7")
