"""The Jamba family: Mamba layers in ragged batches, experts, and a model without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.config import read_config
from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.errors import CheckpointError
from mlxcel.family import Family, Part, Place
from mlxcel.family.caches import KVCacheKind, StateCacheKind
from mlxcel.family.transformer import Mask, flat_parameters
from mlxcel.partition.profile import profile_checkpoint
from mlxcel.stage.load import load_stage
from mlxcel.testing import tiny as checkpoints
from mlxcel.testing.split import (
    SCENES,
    Chain,
    Scene,
    Whole,
    check_split,
    drawn_cut,
    every_cut,
    one_stage,
    unlike_alone,
)

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]

NAMES = ("jamba", "jamba_dense")
ALONE = tuple(scene for scene in SCENES if len(scene.lengths) == 1)
RAGGED = Scene((17, 5, 11))
TOLERANCE = 1e-5
every_checkpoint = pytest.mark.parametrize(
    ("name", "quantize"), [(name, quantize) for name in NAMES for quantize in (None, "4:32")]
)


@every_checkpoint
def test_split_at_every_layer(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None
) -> None:
    """Cut at every boundary, every logit is the uncut model's to the last bit."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    assert len(every_cut(path, family)) == 8
    assert check_split(path, family, scenes=ALONE) == []
    assert check_split(path, family, reference=one_stage) == []


@every_checkpoint
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_split_into_three(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None, seed: int
) -> None:
    """So is every partition into stages of several layers."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    ranges = drawn_cut(path, family, 3, seed)
    assert check_split(path, family, ranges, scenes=[RAGGED], reference=one_stage) == [], ranges


@pytest.mark.parametrize(("name", "quantize"), [("jamba", "4:32"), ("jamba_dense", None)])
def test_split_in_bfloat16(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None
) -> None:
    """Half precision, which a CPU has for packed experts or none, is no less identical."""
    path = tiny(name, quantize=quantize, dtype="bfloat16")
    assert check_split(path, family_of(path), scenes=ALONE) == []
    assert check_split(path, family_of(path), scenes=[RAGGED], reference=one_stage) == []


def test_a_stage_of_mamba_layers_only(tiny: Tiny, family_of: FamilyOf) -> None:
    """A stage without any attention layer runs like the others, batches included."""
    path = tiny("jamba")
    family = family_of(path)
    ranges = [range(3), range(3, 6), range(6, 8)]
    chain = Chain(path, family, ranges)
    assert chain.stages[1].masks == [Mask("none")] * 3
    assert check_split(path, family, ranges, scenes=ALONE) == []
    assert list(unlike_alone(chain, Whole(path, family), RAGGED, TOLERANCE)) == []


LENGTHS = [(17, 5, 11), (5, 17, 11), (1, 12, 5), (9, 1), (1, 1), (6, 6)]
CHUNKS = [2048, 8, 4, 3]
BATCHES = [  # each with one size of chunks quickly, with all of them slowly
    pytest.param(lengths, chunk, marks=[] if i % 4 == j else pytest.mark.slow)
    for i, lengths in enumerate(LENGTHS)
    for j, chunk in enumerate(CHUNKS)
]


@pytest.mark.parametrize(("lengths", "chunk"), BATCHES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_batch_are_single_runs(
    tiny: Tiny, family_of: FamilyOf, name: str, lengths: tuple[int, ...], chunk: int
) -> None:
    """Each row of a ragged batch is what mlx-lm makes of its prompt alone."""
    path = tiny(name)
    family = family_of(path)
    chain = Chain(path, family, every_cut(path, family))
    scene = Scene(lengths, chunk=chunk)
    assert list(unlike_alone(chain, Whole(path, family), scene, TOLERANCE)) == []


def test_what_padding_holds_does_not_matter(tiny: Tiny, family_of: FamilyOf) -> None:
    """States after a padded prefill are those without padding, whatever the padding is."""
    path = tiny("jamba_dense")
    [stage] = one_stage(path, family_of(path)).stages
    block = stage.layers[0].mamba

    def states(rows: mx.array, lengths: list[int] | None) -> list[mx.array]:
        cache = stage.make_caches()[0]
        assert cache is not None
        if lengths is not None:
            cache.prepare(lengths=lengths)
        for start in range(0, rows.shape[1], 4):
            block(rows[:, start : start + 4], cache)
        return list(cache.cache)

    row = mx.random.normal((1, 10, 64), key=mx.random.key(0))
    for length in (1, 2, 3, 6, 10):
        noise = mx.random.normal((1, 10 - length, 64), key=mx.random.key(length))
        padded = mx.concatenate([row[:, :length], noise], axis=1)
        for found, expected in zip(
            states(padded, [length]), states(row[:, :length], None), strict=True
        ):
            assert mx.allclose(found, expected, rtol=0, atol=1e-6).item(), length


def test_mlx_lm_itself_loses_rows(tiny: Tiny, family_of: FamilyOf) -> None:
    """mlx-lm's own block takes padding for text; when that ends, ours can go."""
    path = tiny("jamba")
    whole = Whole(path, family_of(path))
    wrong = list(unlike_alone(whole, whole, RAGGED, TOLERANCE))
    assert any(problem.startswith("sequence 1, token 0: ") for problem in wrong)


# What is planned


@pytest.mark.parametrize("name", NAMES)
def test_shapes(tiny: Tiny, family_of: FamilyOf, name: str) -> None:
    """Every parameter of mlx-lm's model is foretold from config.json, and what is packed."""
    path = tiny(name)
    family = family_of(path)
    shapes = list(family.shapes(family.open(path).config))
    model = checkpoints.draw_model(name)
    drawn = {path: value.shape for path, value in flat_parameters(model).items()}
    assert {shape.name: shape.shape for shape in shapes} == drawn
    assert len(shapes) == len(drawn)
    modules = dict(model.named_modules())
    for shape in shapes:
        module, _, leaf = shape.name.rpartition(".")
        assert shape.packs is (leaf == "weight" and hasattr(modules[module], "to_quantized"))


def test_caches(tiny: Tiny, family_of: FamilyOf) -> None:
    """Attention keeps keys and values, Mamba a tail of its convolution and a state."""
    path = tiny("jamba")
    family = family_of(path)
    kinds = family.caches(family.open(path).config)
    [stage] = one_stage(path, family).stages
    caches = stage.make_caches()
    stage({"tokens": mx.array([[1, 2, 3, 4, 5]])}, caches)
    for kind, cache in zip(kinds, caches, strict=True):
        assert cache is not None
        if isinstance(kind, KVCacheKind):
            assert cache.keys.shape[1:2] + cache.keys.shape[3:] == (kind.heads, kind.key_dim)
        else:
            assert isinstance(kind, StateCacheKind)
            assert [numbers for numbers, _ in kind.states] == [part.size for part in cache.cache]
    assert [isinstance(kind, KVCacheKind) for kind in kinds] == [i in (2, 6) for i in range(8)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers_block_type", ["mamba", "attention"]),
        ("layers_block_type", ["mamba"] * 7 + ["convolution"]),
        ("attn_layer_period", 0),
        ("expert_layer_period", 0),
        ("num_key_value_heads", 3),
        ("mamba_dt_rank", "four"),
        ("mamba_d_state", None),
    ],
)
def test_wrong_configs(
    tiny: Tiny, tmp_path: Path, family_of: FamilyOf, field: str, value: object
) -> None:
    """A config that contradicts itself is refused with the field's name."""
    config = json.loads((tiny("jamba") / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    family = family_of(tmp_path)
    with pytest.raises(CheckpointError, match=field):
        list(family.shapes(read_config(tmp_path)))


def test_block_types_by_name(tiny: Tiny, tmp_path: Path, family_of: FamilyOf) -> None:
    """A list of block types counts before the periods, as in mlx-lm."""
    types = ["attention", "mamba", "mamba", "attention", *["mamba"] * 4]
    config = json.loads((tiny("jamba") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layers_block_type": types}))
    family = family_of(tmp_path)
    kinds = family.caches(read_config(tmp_path))
    assert [isinstance(kind, KVCacheKind) for kind in kinds] == [t == "attention" for t in types]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quantize", [None, "4:32", "4:32:mxfp4"])
def test_bytes(
    tiny: Tiny,
    family_of: FamilyOf,
    assert_planned_bytes: Callable[[Checkpoint, Family, str | None], None],
    name: str,
    quantize: str | None,
    stored_and_cast: tuple[str, str | None],
) -> None:
    """The profile's bytes are those of the loaded model."""
    dtype, cast = stored_and_cast
    path = tiny(name, quantize=quantize, dtype=dtype)
    assert_planned_bytes(family_of(path).open(path), family_of(path), cast)


def test_everything_is_cast(tiny: Tiny, family_of: FamilyOf) -> None:
    """mlx-lm keeps nothing of a Jamba in float32, and neither does --dtype bfloat16."""
    path = tiny("jamba")
    stage = load_stage(family_of(path).open(path), family_of(path), 0, 8, "bfloat16")
    model = checkpoints.draw_model("jamba", dtype="bfloat16")
    for parameters in (flat_parameters(stage.model), flat_parameters(model)):
        assert {value.dtype for value in parameters.values()} == {mx.bfloat16}


def test_work_counts_the_experts_of_a_token(tiny: Tiny, family_of: FamilyOf) -> None:
    """Of four experts a token passes two, in the hub's naming and in mlx-lm's."""
    hub, converted = tiny("jamba"), tiny("jamba", quantize="4:32")
    family = family_of(hub)
    config = family.open(hub).config
    for name in (
        "model.layers.1.feed_forward.experts.3.up_proj.weight",
        "model.layers.1.feed_forward.switch_mlp.up_proj.weight",
    ):
        assert family.touched(name, config) == 0.5
        assert family.place(name, config) == Place(Part.LAYER, 1)
    assert family.touched("model.layers.1.feed_forward.router.weight", config) == 1
    assert family.place("model.final_layernorm.weight", config) == Place(Part.HEAD)
    work = [
        [layer.work for layer in profile_checkpoint(family.open(path), family, as_stored).layers]
        for path in (hub, converted)
        for as_stored in [DtypeChoice(None, "")]
    ]
    assert work[0] == work[1]


def test_the_model_is_mlx_lms(tiny: Tiny, family_of: FamilyOf) -> None:
    """Only the Mamba blocks are ours, and attention layers have none."""
    path = tiny("jamba")
    [stage] = one_stage(path, family_of(path)).stages
    ours: dict[int, set[str]] = {}
    for index, layer in enumerate(stage.layers):
        modules: list[tuple[str, nn.Module]] = layer.named_modules()
        ours[index] = {p for p, m in modules if type(m).__module__.startswith("mlxcel")}
    assert ours == {index: set() if index in (2, 6) else {"mamba"} for index in range(8)}


# Greedy tokens


@every_checkpoint
def test_generate(
    tiny: Tiny,
    assert_greedy_parity: Callable[[Path, str], None],
    name: str,
    quantize: str | None,
) -> None:
    """mlxcel generate gives mlx-lm's greedy tokens, a ragged batch those of single runs."""
    assert_greedy_parity(tiny(name, quantize=quantize), "0-2,3-5,6-7")
