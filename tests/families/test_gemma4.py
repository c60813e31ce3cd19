"""The Gemma 4 family: per-layer inputs, shared keys and values, experts, a second tower."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcel.checkpoint.checkpoint import open_checkpoint
from mlxcel.checkpoint.config import ModelConfig, read_config
from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.cli.main import run
from mlxcel.engine.engine import Settings
from mlxcel.engine.local import open_model
from mlxcel.engine.service import kv_managers
from mlxcel.errors import PartitionError
from mlxcel.family import Family, Part
from mlxcel.family.choose import choose_family
from mlxcel.family.transformer import flat_parameters
from mlxcel.partition.cache_bytes import Workload
from mlxcel.partition.plan import make_plan
from mlxcel.partition.ranges import legal_cuts, parse_ranges, validate_ranges
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import ALONE, TensorParallel
from mlxcel.testing.split import (
    HANDLE,
    Chain,
    Scene,
    Whole,
    check_illegal_cuts,
    check_split,
    differences,
    drawn_cut,
    every_cut,
    unlike_alone,
)

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]

RAGGED = Scene((17, 5, 11))
SHARED_VOCABULARY = TensorParallel(2, embedding="vocab_parallel", head="vocab_parallel")
SHARING = ("gemma4", "gemma4_text", "gemma4_vlm")
every_checkpoint = pytest.mark.parametrize(
    ("name", "quantize"), list(itertools.product([*SHARING, "gemma4_moe"], [None, "4:32"]))
)


def sharing_config(tmp_path: Path, **settings: Any) -> ModelConfig:
    """A config.json with nothing but what decides about sharing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_text", **settings}))
    return read_config(tmp_path)


def used(path: Path, family: Family) -> set[str]:
    """The tensors of the checkpoint that the family has a place for."""
    checkpoint = family.open(path)
    places = {name: family.place(name, checkpoint.config).part for name in checkpoint.tensors}
    return {name for name, part in places.items() if part is not Part.UNUSED}


@pytest.fixture
def gemma4(plugins: Plugins) -> Family:
    family = plugins.load("family", "gemma4")
    assert isinstance(family, Family)
    return family


@every_checkpoint
def test_split_at_every_legal_layer(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None
) -> None:
    """Cut at every legal boundary, every logit is the whole model's to the last bit."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    assert len(every_cut(path, family)) == (3 if name in SHARING else 6)
    assert check_split(path, family) == []


@every_checkpoint
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_split_in_other_ways(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None, seed: int
) -> None:
    """So is every partition into fewer stages."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    cuts = [(range(1), range(1, 8)), (range(2), range(2, 8))]
    ranges = cuts[seed] if name in SHARING else drawn_cut(path, family, 3, seed)
    assert check_split(path, family, ranges, scenes=[RAGGED]) == [], ranges


def test_split_in_bfloat16(tiny: Tiny, family_of: FamilyOf) -> None:
    """Half precision is no less identical."""
    path = tiny("gemma4", dtype="bfloat16")
    assert check_split(path, family_of(path), scenes=[RAGGED]) == []


@pytest.mark.parametrize("name", [*SHARING, "gemma4_moe"])
def test_illegal_cuts(tiny: Tiny, family_of: FamilyOf, name: str) -> None:
    """A boundary between a layer and one that reads its keys and values is refused."""
    path = tiny(name)
    family = family_of(path)
    assert check_illegal_cuts(path, family) == []
    config = family.open(path).config
    legal = legal_cuts(config.num_layers, family.adjacency(config))
    assert legal == ((1, 2) if name in SHARING else (1, 2, 3, 4, 5))


# Mirrors


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        ("gemma4", None),
        ("gemma4_text", "4:32"),
        pytest.param("gemma4_text", None, marks=pytest.mark.slow),
        pytest.param("gemma4_vlm", "4:32", marks=pytest.mark.slow),
    ],
)
def test_split_at_every_layer_with_mirrors(
    tiny: Tiny, family_of: FamilyOf, name: str, quantize: str | None
) -> None:
    """With mirrors every cut is legal, and every logit is the whole model's to the last bit."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    ranges = every_cut(path, family, mirrors=True)
    assert ranges == tuple(range(layer, layer + 1) for layer in range(8))
    assert check_split(path, family, ranges) == []


@pytest.mark.parametrize("cut", [3, 4, 5, 6, 7])
def test_one_cut_with_mirrors(tiny: Tiny, family_of: FamilyOf, cut: int) -> None:
    """So is each cut alone, where a stage has layers with their source and without."""
    path = tiny("gemma4")
    ranges = (range(cut), range(cut, 8))
    assert check_split(path, family_of(path), ranges, scenes=[Scene((17, 5, 11), chunk=4)]) == []


def test_rows_with_mirrors_are_single_runs(tiny: Tiny, family_of: FamilyOf) -> None:
    """Each row of a ragged batch is what mlx-lm makes of its prompt alone."""
    path = tiny("gemma4")
    family = family_of(path)
    chain = Chain(path, family, every_cut(path, family, mirrors=True))
    assert list(unlike_alone(chain, Whole(path, family), RAGGED, 1e-4)) == []


def test_new_keys_and_values_cross(tiny: Tiny, family_of: FamilyOf) -> None:
    """Of each source that layers behind the cut read, and only what the step adds."""
    path = tiny("gemma4")
    first, middle, last = Chain(path, family_of(path), [range(4), range(4, 5), range(5, 8)]).stages
    tokens = {"tokens": mx.array([[1, 2, 3]])}
    payload = first(tokens, first.make_caches())
    sizes = {2: 32, 3: 64}  # sliding and full
    assert {name: value.shape for name, value in payload.items()} == {
        "h": (1, 3, 64),
        "per_layer": (1, 3, 4, 64),
        **{
            f"{kind}_{s}": (1, 2, 3, dim) for s, dim in sizes.items() for kind in ("keys", "values")
        },
    }
    assert len(middle.make_caches()) == 2  # one layer without a cache, one mirror
    passed_on = middle(payload, middle.make_caches())
    for name in ("keys_2", "values_3"):
        assert mx.array_equal(passed_on[name], payload[name]).item()
    assert set(last(passed_on, last.make_caches())) == {"h"}


def test_mirrors_are_accounted_for(tiny: Tiny, family_of: FamilyOf, plugins: Plugins) -> None:
    """A plan counts each mirror on the stage that holds it, and its caches stay within that."""
    path = tiny("gemma4")
    family = family_of(path)
    checkpoint = family.open(path)
    workload = Workload(max(RAGGED.lengths) + RAGGED.steps, sequences=3)
    ranges = every_cut(path, family, mirrors=True)
    layers = ",".join(str(r.start) for r in ranges)
    as_stored = DtypeChoice(None, "")
    plan = make_plan(
        checkpoint, family, as_stored, plugins, layers=layers, workload=workload, mirrors=True
    )
    assert [stage.mirrors for stage in plan.stages] == [(), (), (), (), (2,), (3,), (2,), (3,)]
    chain = Chain(path, family, ranges)
    assert list(differences(Whole(path, family), chain, RAGGED)) == []
    for stage, table in zip(plan.stages, chain.tables, strict=True):
        held = sum(cache.nbytes for cache in table[HANDLE].caches if cache is not None)
        assert 0 < held <= stage.kv_bytes


def test_the_engine_reserves_mirrors(tiny: Tiny, plugins: Plugins) -> None:
    """A server takes a sequence only if the mirrors have room too."""
    model = open_model(tiny("gemma4"), plugins, layers="0-3,4-7", mirrors=True)
    first, second = kv_managers(model, Settings(), [None, None])
    source = open_model(tiny("gemma4"), plugins, layers="0-1,2-7")
    both = kv_managers(source, Settings(), [None, None])
    assert second.bytes_of(3, 20) == both[1].bytes_of(3, 20) > 0
    assert first.bytes_of(3, 20) == sum(manager.bytes_of(3, 20) for manager in both)


def test_the_flag(
    tiny: Tiny,
    capsys: pytest.CaptureFixture[str],
    assert_greedy_parity: Callable[..., None],
) -> None:
    """Only --allow-mirrored-kv makes such a cut legal; the refusal says so."""
    path = tiny("gemma4")
    assert run(["plan", "-m", str(path), "--pp-layers", "0-3,4-7"]) == 2
    assert "With --allow-mirrored-kv any cut will do" in capsys.readouterr().err
    command = ["plan", "-m", str(path), "--pp-size", "8", "--allow-mirrored-kv", "--json"]
    assert run(command) == 0
    assert len(json.loads(capsys.readouterr().out)["stages"]) == 8
    assert_greedy_parity(path, "0-2,3-5,6-7", "--allow-mirrored-kv")


def test_the_shape_of_e2b(tmp_path: Path, gemma4: Family) -> None:
    """35 layers, the last 20 shared, every fifth global: stages may begin at 1 to 13 only."""
    config = sharing_config(
        tmp_path, num_hidden_layers=35, num_kv_shared_layers=20, sliding_window_pattern=5
    )
    groups = gemma4.adjacency(config)
    assert legal_cuts(35, groups) == tuple(range(1, 14))
    validate_ranges(parse_ranges("0-12,13-34"), 35, groups)
    with pytest.raises(PartitionError) as caught:
        validate_ranges(parse_ranges("0-13,14-34"), 35, groups)
    assert "source layer 13 and consumer layer" in str(caught.value)
    assert "reads the keys and values of layer 13 (sliding_attention)" in str(caught.value)
    assert "begin a stage at layer 13." in str(caught.value)


def test_sharing_by_layer_types(tmp_path: Path, gemma4: Family) -> None:
    """A shared layer reads the last layer of its own kind that has keys and values."""
    full, sliding = "full_attention", "sliding_attention"
    config = sharing_config(
        tmp_path,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=[full, sliding, full, sliding, sliding, full],
    )
    groups = gemma4.adjacency(config)
    assert [(group.start, group.end) for group in groups] == [(3, 5), (2, 6)]


def test_nothing_shared(tmp_path: Path, gemma4: Family) -> None:
    """The large models may be cut anywhere."""
    config = sharing_config(tmp_path, num_hidden_layers=30, num_kv_shared_layers=0)
    assert gemma4.adjacency(config) == ()


def test_what_crosses_the_boundary(tiny: Tiny, family_of: FamilyOf) -> None:
    """The per-layer inputs of the layers that are still to come, and nothing behind the last."""
    path = tiny("gemma4")
    first, last = Chain(path, family_of(path), [range(2), range(2, 8)]).stages
    payload = first({"tokens": mx.array([[1, 2, 3]])}, first.make_caches())
    assert {name: value.shape for name, value in payload.items()} == {
        "h": (1, 3, 64),
        "per_layer": (1, 3, 6, 64),
    }
    assert set(last(payload, last.make_caches())) == {"h"}


def test_forgotten_per_layer_inputs_are_found(tiny: Tiny, family_of: FamilyOf) -> None:
    """The check fails where it should: inputs of the wrong layers show in the logits."""
    path = tiny("gemma4")
    family = family_of(path)

    class Shifted(family.stage_class()):  # type: ignore[misc]
        def run(self, payload: Any, caches: Any) -> Any:
            out = super().run(payload, caches)
            if "per_layer" in out:
                out["per_layer"] = mx.roll(out["per_layer"], 1, axis=2)
            return out

    class Wrong(type(family)):  # type: ignore[misc]
        def stage_class(self) -> Any:
            return Shifted

    assert check_split(path, Wrong(), scenes=[Scene((5,), steps=1)]) != []


def test_the_vision_tower_is_never_read(tiny: Tiny, family_of: FamilyOf, plugins: Plugins) -> None:
    """A checkpoint with a vision_config runs as its text tower, whose logits are gemma4's."""
    path = tiny("gemma4_vlm")
    name, family = choose_family(read_config(path), plugins)
    assert name == "gemma4_vlm"
    tower = {name for name in open_checkpoint(path).tensors if "vision" in name}
    assert tower
    assert tower.isdisjoint(used(path, family))
    chain = Chain(path, family, every_cut(path, family))
    for stage in chain.stages:
        parameters = flat_parameters(stage.model)
        assert not [name for name in parameters if "vision" in name]
        assert not any(mx.isnan(value).any().item() for value in parameters.values())
    assert list(differences(Whole(tiny("gemma4"), family), chain, RAGGED)) == []


def test_unused_keys_and_values_are_never_read(tiny: Tiny, family_of: FamilyOf) -> None:
    """Layers that share another's keys and values hold none, though the file has some."""
    path = tiny("gemma4")
    family = family_of(path)
    assert len(set(open_checkpoint(path).tensors) - used(path, family)) == 4 * 3
    [stage] = Chain(path, family, [range(8)]).stages
    own = {name.rpartition(".")[0] for name in flat_parameters(stage.model) if "k_proj" in name}
    assert {name.split(".")[-3] for name in own} == {"0", "1", "2", "3"}


@pytest.mark.parametrize("tensor", [ALONE, SHARED_VOCABULARY], ids=["alone", "ranks"])
def test_tokens_beyond_the_per_layer_table(
    tiny: Tiny, gemma4: Family, tmp_path: Path, tensor: TensorParallel
) -> None:
    """They get the per-layer inputs of token 0, also where ranks share the vocabulary out."""
    rows, name = 100, "model.embed_tokens_per_layer.weight"
    short, whole = tmp_path / "short", tmp_path / "whole"
    for path in (short, whole):
        shutil.copytree(tiny("gemma4_text"), path)
    tensors = mx.load(str(short / "model.safetensors"))
    assert isinstance(tensors, dict)
    beyond = mx.arange(tensors[name].shape[0])
    first = {**tensors, name: tensors[name][:rows]}
    zeroth = {**tensors, name: tensors[name][mx.where(beyond < rows, beyond, 0)]}
    mx.save_safetensors(str(short / "model.safetensors"), first, {"format": "pt"})
    mx.save_safetensors(str(whole / "model.safetensors"), zeroth, {"format": "pt"})
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "vocab_size_per_layer_input": rows}))
    one, other = (
        Chain(path, gemma4, every_cut(path, gemma4), tensor=tensor) for path in (short, whole)
    )
    assert any(token >= rows for prompt in RAGGED.prompts() for token in prompt.prompt)
    assert list(differences(other, one, RAGGED)) == []
