"""Loading one stage: its own tensors, all of them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcel.checkpoint.dtype import DTYPES, choose_dtype
from mlxcel.errors import CheckpointError, UnsupportedError
from mlxcel.family import Family
from mlxcel.family.transformer import TransformerStage, flat_parameters
from mlxcel.partition.assignment import assign
from mlxcel.partition.balance import balance
from mlxcel.partition.profile import profile_checkpoint
from mlxcel.stage.load import load_stage
from mlxcel.testing.quick import quick
from mlxcel.testing.tiny import names

Q_PROJ = "model.layers.3.self_attn.q_proj.weight"

Load = Callable[..., TransformerStage]
FamilyOf = Callable[[Path], Family]


@pytest.fixture
def load(family_of: FamilyOf) -> Load:
    def call(
        path: Path, start: int = 0, stop: int = 6, cast: str | None = None, **options: Any
    ) -> TransformerStage:
        family = family_of(path)
        return load_stage(family.open(path), family, start, stop, cast, **options)

    return call


def dtypes(stage: TransformerStage) -> set[mx.Dtype]:
    return {value.dtype for value in flat_parameters(stage.model).values()}


def test_a_stage_holds_its_own_layers_only(tiny: Callable[..., Path], load: Load) -> None:
    """Middle stages have neither embedding nor head; layers count from 0 within the stage."""
    names = flat_parameters(load(tiny("llama"), 2, 4).model)
    assert {name.split(".")[2] for name in names} == {"0", "1"}
    assert all(name.startswith("model.layers.") for name in names)
    first = flat_parameters(load(tiny("llama"), 0, 1).model)
    assert {n for n in first if "layers" not in n} == {"model.embed_tokens.weight"}
    last = flat_parameters(load(tiny("llama"), 5, 6).model)
    assert {n for n in last if "layers" not in n} == {"model.norm.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    ("name", "tied", "in_file"),
    [
        ("llama", False, True),
        ("llama_tied", True, False),
        ("llama_tied_head", True, True),
    ],
)
def test_the_forms_of_tying(
    tiny: Callable[..., Path], load: Load, name: str, tied: bool, in_file: bool
) -> None:
    """A tied last stage has the table and no head, whatever the file holds beside it."""
    weights = mx.load(str(tiny(name) / "model.safetensors"))
    assert ("lm_head.weight" in weights) is in_file
    for start in (0, 3):
        last = flat_parameters(load(tiny(name), start, 6).model)
        assert ("lm_head.weight" in last) is not tied
        assert ("model.embed_tokens.weight" in last) is (tied or start == 0)
    first = flat_parameters(load(tiny(name), 0, 3).model)
    assert mx.array_equal(
        first["model.embed_tokens.weight"], weights["model.embed_tokens.weight"]
    ).item()
    assert "lm_head.weight" not in first


def test_untied_without_a_head_is_refused(tiny: Callable[..., Path], load: Load) -> None:
    """The fourth form contradicts itself: the last stage names what is missing."""
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        load(tiny("llama_untied_headless"), 3, 6)


@pytest.mark.parametrize("cast", ["float32", "bfloat16", "float16"])
def test_casts(tiny: Callable[..., Path], load: Load, cast: str) -> None:
    """Floating parameters take the dtype; packed ones stay what they are."""
    assert dtypes(load(tiny("llama"), cast=cast)) == {getattr(mx, cast)}
    packed = load(tiny("llama", quantize="4:32", dtype="bfloat16"), cast=cast)
    assert dtypes(packed) == {getattr(mx, cast), mx.uint32}


def test_without_a_cast_everything_stays(tiny: Callable[..., Path], load: Load) -> None:
    """The stage has the file's own numbers, bit for bit."""
    path = tiny("llama", dtype="bfloat16")
    stage = load(path)
    weights = mx.load(str(path / "model.safetensors"))
    parameters = flat_parameters(stage.model)
    assert parameters.keys() == weights.keys()
    for name, value in parameters.items():
        assert value.dtype == mx.bfloat16
        assert mx.array_equal(value, weights[name]).item(), name


def test_a_family_can_keep_tensors_from_the_cast(
    tiny: Callable[..., Path], family_of: FamilyOf
) -> None:
    """Where the family says that --dtype does not apply, a parameter keeps its type."""

    class Keeps(type(family_of(tiny("llama")))):  # type: ignore[misc]
        def casts(self, name: str) -> bool:
            return "norm" not in name

    family = Keeps()
    stage = load_stage(family.open(tiny("llama")), family, 0, 6, "bfloat16")
    kept = {n for n, v in flat_parameters(stage.model).items() if v.dtype == mx.float32}
    assert kept == {n for n in flat_parameters(stage.model) if "norm" in n}


def test_shards(tiny: Callable[..., Path], load: Load) -> None:
    """A stage whose tensors stand in several files is the same as from one file."""
    one, three = load(tiny("llama"), 1, 4), load(tiny("llama", shards=3), 1, 4)
    for name, value in flat_parameters(one.model).items():
        assert mx.array_equal(value, flat_parameters(three.model)[name]).item(), name


def test_progress(tiny: Callable[..., Path], load: Load) -> None:
    """Progress counts evaluated bytes up to the bytes that the stage holds."""
    seen: list[tuple[int, int]] = []
    stage = load(tiny("llama"), 0, 3, progress=lambda done, total: seen.append((done, total)))
    done = [bytes for bytes, _ in seen]
    assert len(seen) == 4, "the embedding, then each layer"
    assert done == sorted(set(done))
    assert {total for _, total in seen} == {stage.nbytes()} == {done[-1]}


def test_a_missing_tensor(tiny: Callable[..., Path], altered: Any, load: Load) -> None:
    """The error names checkpoint and tensor; stages that do not need it load all the same."""
    path = altered(tiny("llama"), {Q_PROJ: None})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight") as caught:
        load(path, 2, 6)
    assert caught.value.path == path
    load(path, 0, 3)
    load(path, 4, 6)


def test_many_missing_tensors_are_counted(
    tiny: Callable[..., Path], altered: Any, load: Load
) -> None:
    """A long list is cut short and says how much more there is."""
    weights = mx.load(str(tiny("llama") / "model.safetensors"))
    gone = {name: None for name in weights if name.startswith("model.layers.3.")}
    with pytest.raises(CheckpointError, match=f"and {len(gone) - 4} more tensors") as caught:
        load(altered(tiny("llama"), gone), 3, 4)
    assert str(caught.value).count("model.layers.") <= 4


def test_a_stray_tensor(tiny: Callable[..., Path], altered: Any, load: Load) -> None:
    """A tensor of a layer that the model does not have is refused by name."""
    path = altered(tiny("llama"), {"model.layers.3.self_attn.sinks": mx.zeros((4,))})
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.3\.self_attn\.sinks is not"
    ) as caught:
        load(path)
    assert caught.value.path == path


def test_tensors_of_other_parts_are_left_alone(
    tiny: Callable[..., Path], altered: Any, load: Load
) -> None:
    """Buffers and other towers, which the family places nowhere, are no reason to refuse."""
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": mx.zeros((16,)),
        "vision_tower.patch_embed.weight": mx.zeros((4, 4)),
    }
    names = flat_parameters(load(altered(tiny("llama"), extra)).model)
    assert names.keys() == flat_parameters(load(tiny("llama")).model).keys()


def test_a_wrong_shape(tiny: Callable[..., Path], altered: Any, load: Load) -> None:
    """The error names the tensor, what it is and what it should be."""
    path = altered(tiny("llama"), {Q_PROJ: mx.zeros((64, 64))})
    with pytest.raises(CheckpointError, match=r"q_proj.* \(64, 64\).* \(128, 64\)") as caught:
        load(path)
    assert caught.value.path == path


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "rms_norm_eps"])
def test_a_missing_setting(tiny: Callable[..., Path], altered: Any, load: Load, field: str) -> None:
    """A config.json without a field that the model needs is named, with the field."""
    path = altered(tiny("llama"), config={field: None})
    with pytest.raises(CheckpointError, match=field) as caught:
        load(path)
    assert caught.value.path == path / "config.json"


def test_a_setting_of_the_wrong_kind(tiny: Callable[..., Path], altered: Any, load: Load) -> None:
    """A value that no model can be built with is an error of config.json."""
    with pytest.raises(CheckpointError) as caught:
        load(altered(tiny("llama"), config={"hidden_size": "many"}))
    assert caught.value.path.name == "config.json"


def test_settings_of_another_model(tiny: Callable[..., Path], altered: Any, load: Load) -> None:
    """Weights that sanitize cannot take apart are the checkpoint's fault, not a traceback."""
    with pytest.raises(CheckpointError):
        load(altered(tiny("llama"), config={"model_type": "gemma4_text"}))


@pytest.mark.parametrize("alteration", [{"scales": mx.zeros((128, 3))}, {"weight": None}])
def test_a_packing_that_does_not_exist(
    tiny: Callable[..., Path], altered: Any, load: Load, alteration: dict[str, Any]
) -> None:
    """Scales that fit no quantization, or no weight, are refused with the module's name."""
    module = "model.layers.3.self_attn.q_proj"
    tensors = {f"{module}.{name}": value for name, value in alteration.items()}
    with pytest.raises(CheckpointError, match=f"{module} is packed"):
        load(altered(tiny("llama", quantize="4:32"), tensors))


def supported(path: Path, family: Family) -> Iterator[tuple[str, Any, Any]]:
    checkpoint = family.open(path)
    for dtype in DTYPES:
        try:
            yield dtype, checkpoint, choose_dtype(checkpoint, dtype, "cpu")
        except UnsupportedError:
            assert dtype != "auto", "auto always finds a way"


@pytest.mark.parametrize("quantize", quick([None, "4:32"], [None]))
@pytest.mark.parametrize("name", sorted({*names()} - {"llama_untied_headless"}))  # is refused
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_are_those_of_the_profile(
    tiny: Callable[..., Path], family_of: FamilyOf, name: str, quantize: str | None, stages: int
) -> None:
    """Every stage of every plan loads exactly the bytes that were planned from the headers."""
    path = tiny(name, quantize=quantize, dtype="bfloat16")
    family = family_of(path)
    for dtype, checkpoint, choice in supported(path, family):
        profile = profile_checkpoint(checkpoint, family, choice)
        for planned in assign(profile, balance(profile, stages)):
            layers = planned.layer_range
            stage = load_stage(checkpoint, family, layers.start, layers.stop, choice.cast)
            assert stage.nbytes() == planned.estimated_memory_bytes, (dtype, planned.stage_index)
