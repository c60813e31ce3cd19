"""The Llama family: split equals whole over its tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcel.family import Family, Part, Place
from mlxcel.family.transformer import Mask, Payload, flat_parameters
from mlxcel.testing.split import (
    Chain,
    Scene,
    Whole,
    check_split,
    differences,
    drawn_cut,
    every_cut,
)

Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]

RAGGED = Scene((17, 5, 11))
NAMES = ("llama", "llama_sliding", "llama_tied", "llama_tied_head")
every_checkpoint = pytest.mark.parametrize(
    ("name", "options"),
    [(name, {"quantize": quantize}) for name in NAMES for quantize in (None, "4:32")]
    + [("llama", {"dtype": "bfloat16"}), ("llama", {"dtype": "float16"})],
    ids=lambda value: value if isinstance(value, str) else next(iter(value.values())) or "float32",
)


@every_checkpoint
def test_split_at_every_layer(
    tiny: Tiny, family_of: FamilyOf, name: str, options: dict[str, Any]
) -> None:
    """Cut at every boundary, every logit is the whole model's to the last bit."""
    path = tiny(name, **options)
    family = family_of(path)
    assert len(every_cut(path, family)) == 6, "every boundary of a Llama is legal"
    assert check_split(path, family) == []


@every_checkpoint
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_split_into_three(
    tiny: Tiny, family_of: FamilyOf, name: str, options: dict[str, Any], seed: int
) -> None:
    """So is every partition into stages of several layers."""
    path = tiny(name, **options)
    family = family_of(path)
    ranges = drawn_cut(path, family, 3, seed)
    assert check_split(path, family, ranges, scenes=[RAGGED]) == [], ranges


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_split_after_a_cast(tiny: Tiny, family_of: FamilyOf, dtype: str) -> None:
    """--dtype makes both sides the same again, whatever is stored."""
    for stored in ("float32", "bfloat16"):
        path = tiny("llama", dtype=stored)
        assert check_split(path, family_of(path), dtype=dtype, scenes=[RAGGED]) == []


def test_a_row_without_any_prefill(tiny: Tiny, family_of: FamilyOf) -> None:
    """A prompt of one token in a ragged batch is padding only, until its first step."""
    path = tiny("llama_sliding")
    scenes = [Scene((1, 12, 5)), Scene((1, 1)), Scene((1,))]
    assert check_split(path, family_of(path), scenes=scenes) == []


def test_sliding_layers_matter(tiny: Tiny, family_of: FamilyOf) -> None:
    """The sliding checkpoint has layers of both kinds on one stage, and each its own mask."""
    path = tiny("llama_sliding")
    [stage] = Chain(path, family_of(path), [range(6)]).stages
    assert stage.masks == [Mask("sliding", 8), Mask("sliding", 8), Mask("full")] * 2


def test_a_wrong_mask_is_found(tiny: Tiny, family_of: FamilyOf) -> None:
    """The check fails where it should: a window that is too short is reported."""
    path = tiny("llama_sliding")
    family = family_of(path)

    class ShortSighted(family.stage_class()):  # type: ignore[misc]
        def mask_of(self, index: int, layer: Any) -> Mask:
            right: Mask = super().mask_of(index, layer)
            return right if right.window is None else Mask("sliding", right.window // 2)

    class Wrong(type(family)):  # type: ignore[misc]
        def stage_class(self) -> Any:
            return ShortSighted

    found = check_split(path, Wrong(), scenes=[Scene((17,)), RAGGED])
    assert any("Scene(lengths=(17,)" in difference for difference in found)
    assert any("Scene(lengths=(17, 5, 11)" in difference for difference in found)


def test_tampered_weights_are_found(tiny: Tiny, family_of: FamilyOf) -> None:
    """One number of one layer that differs shows in the logits from the first step on."""
    path = tiny("llama")
    family = family_of(path)
    chain = Chain(path, family, every_cut(path, family))
    weight = flat_parameters(chain.stages[3].layers[0])["self_attn.q_proj.weight"]
    weight[0, 0] += 1.0
    chain.stages[3].layers[0].self_attn.q_proj.weight = weight
    first, *_ = differences(Whole(path, family), chain, RAGGED)
    assert first.startswith("prefill step 0: logits differ by up to")


def test_a_lost_bit_is_found(tiny: Tiny, family_of: FamilyOf) -> None:
    """Hidden states that are rounded on their way are not identical any more."""
    path = tiny("llama")
    family = family_of(path)

    class Rounding(family.stage_class()):  # type: ignore[misc]
        def run(self, payload: Payload, caches: list[Any]) -> Payload:
            out = super().run(payload, caches)
            return {"h": out["h"].astype(mx.bfloat16).astype(mx.float32)}

    class Wrong(type(family)):  # type: ignore[misc]
        def stage_class(self) -> Any:
            return Rounding

    assert check_split(path, Wrong(), scenes=[Scene((5,), steps=1)]) != []


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.embed_tokens.weight", Place(Part.TABLE)),
        ("model.layers.0.mlp.up_proj.weight", Place(Part.LAYER, 0)),
        ("model.layers.5.self_attn.q_proj.bias", Place(Part.LAYER, 5)),
        ("model.layers.6.mlp.up_proj.weight", Place(Part.UNUSED)),
        ("model.layers.1.self_attn.rotary_emb.inv_freq", Place(Part.UNUSED)),
        ("model.norm.weight", Place(Part.HEAD)),
    ],
)
def test_places(tiny: Tiny, family_of: FamilyOf, name: str, place: Place) -> None:
    """Each tensor has its part of the model."""
    path = tiny("llama")
    assert family_of(path).place(name, family_of(path).open(path).config) == place


def test_the_head_has_a_place_only_if_untied(tiny: Tiny, family_of: FamilyOf) -> None:
    """A head in the file of a tied model is never read."""
    for name, part in (("llama", Part.HEAD), ("llama_tied_head", Part.UNUSED)):
        family = family_of(tiny(name))
        assert family.place("lm_head.weight", family.open(tiny(name)).config) == Place(part)
