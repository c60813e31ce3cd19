"""Quantized checkpoints whose modules become plain float32 ones at load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.engine.local import open_model, running
from mlxcel.errors import CheckpointError
from mlxcel.family.choose import choose_family
from mlxcel.family.contract import Family
from mlxcel.family.transformer import flat_parameters
from mlxcel.partition.profile import profile_checkpoint
from mlxcel.plugins import Plugins
from mlxcel.stage import packed
from mlxcel.stage.load import load_stage
from mlxcel.stage.packed import BLOCK_BYTES, Packed
from mlxcel.testing.split import check_split

OVERRIDES = {"*.layers.0.*": "8:64", "*.layers.1.mlp.*": "none", "*embed_tokens": "4:32:mxfp4"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "affine": ("llama", {"quantize": "4:32"}),
    "tied": ("llama_tied", {"quantize": "4:32"}),
    "half": ("llama_tied", {"quantize": "4:64", "dtype": "bfloat16"}),
    "overrides": ("llama_tied", {"quantize": "4:32", "overrides": OVERRIDES}),
    "gemma4": ("gemma4", {"quantize": "4:32"}),
    "experts": ("gemma4_moe", {"quantize": "4:32:mxfp4"}),
    "nvfp4": ("gemma4_moe", {"quantize": "4:16:nvfp4", "dtype": "bfloat16"}),
    "latent": ("deepseek_v3", {"quantize": "4:32"}),
    "recurrent": ("qwen3_5", {"quantize": "4:32"}),
}


@pytest.fixture(params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Path:
    name, options = VARIANTS[request.param]
    return tiny(name, **options)


def family_of(path: Path) -> Family:
    from mlxcel.checkpoint.config import read_config

    return choose_family(read_config(path), Plugins.discover())[1]


def test_split_equals_the_dequantized_whole(checkpoint: Path) -> None:
    """Every cut of a dequantized model has the logits of mlx-lm's model with those weights."""
    family = family_of(checkpoint)
    assert check_split(checkpoint, family, dtype="float32", dequantize=True) == []


def test_bytes_are_those_of_the_profile(checkpoint: Path) -> None:
    """The profile knows from the headers what a dequantized stage will hold."""
    family = family_of(checkpoint)
    model = family.open(checkpoint)
    profile = profile_checkpoint(model, family, DtypeChoice("float32", ""), dequantize=True)
    layers, middle = [layer.bytes for layer in profile.layers], 2
    count = len(layers)

    def loaded(start: int, stop: int) -> int:
        return load_stage(model, family, start, stop, "float32", dequantize=True).nbytes()

    assert loaded(0, middle) == profile.embedding_bytes + sum(layers[:middle])
    assert loaded(0, count) == profile.total_bytes - profile.shared_bytes


def test_nothing_quantized_is_left(checkpoint: Path) -> None:
    """All parameters are float32, and no module multiplies with packed weights."""
    family = family_of(checkpoint)
    model = family.open(checkpoint)
    stage = load_stage(model, family, 0, model.config.num_layers, "float32", dequantize=True)
    parameters = flat_parameters(stage.model)
    assert {value.dtype for value in parameters.values()} == {mx.float32}
    assert not any(name.endswith((".scales", ".biases")) for name in parameters)
    assert not any("Quantized" in type(m).__name__ for m in stage.model.modules())


def test_progress(tiny: Callable[..., Path]) -> None:
    """Progress rises to the bytes of the dequantized stage."""
    path = tiny("llama", quantize="4:32")
    family, told = family_of(path), list[tuple[int, int]]()
    stage = load_stage(
        family.open(path), family, 0, 3, "float32", lambda *now: told.append(now), dequantize=True
    )
    done = [now for now, _ in told]
    assert done == sorted(set(done)) and done[-1] == stage.nbytes()
    assert {total for _, total in told} == {stage.nbytes()}


def test_plain_checkpoints_stay_as_they_are(tiny: Callable[..., Path]) -> None:
    """Without packed weights there is nothing to dequantize, only to cast."""
    path = tiny("llama")
    assert check_split(path, family_of(path), dtype="float32", dequantize=True) == []


def test_missing_biases(tiny: Callable[..., Path], altered: Any) -> None:
    """A packed tensor without its biases is refused by name."""
    name = "model.layers.1.mlp.up_proj.biases"
    path = altered(tiny("llama", quantize="4:32"), {name: None})
    family = family_of(path)
    with pytest.raises(CheckpointError, match=name):
        load_stage(family.open(path), family, 0, 6, "float32", dequantize=True)


def test_open_model_hands_it_on(tiny: Callable[..., Path]) -> None:
    """--weights dequantized reaches plan and stages, which hold what the plan says."""
    path = tiny("llama_tied", quantize="4:64", dtype="bfloat16")
    model = open_model(path, Plugins.discover(), size=2, weights="dequantized")
    assert model.dtype.cast == "float32"
    assert any("dequantized" in notice for notice in model.notices)
    planned = [stage.estimated_memory_bytes for stage in model.plan.stages]
    with running(model, credits=1, timeout=60) as pipeline:
        assert [stage.bytes for stage in pipeline.loaded] == planned


def test_threads_keep_quantized_weights_by_default(tiny: Callable[..., Path]) -> None:
    """Without a fast BLAS, packed weights stay packed."""
    model = open_model(tiny("llama", quantize="4:32"), Plugins.discover())
    assert not any(spec.dequantize for spec in model.specs)


# One tensor.

MODES = {"affine": (32, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


def pack(mode: str, shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> Packed:
    """Random numbers, packed."""
    group_size, bits = MODES[mode]
    drawn = mx.random.normal(shape, key=mx.random.key(3)).astype(dtype)
    weight, scales, *biases = mx.quantize(drawn, group_size, bits, mode=mode)
    mx.eval(weight, scales, biases)
    return Packed(weight, scales, biases[0] if biases else None, None, group_size, bits, mode)


def whole(one: Packed) -> mx.array:
    """What MLX makes of the packed tensor in one piece, with scales in float32."""
    biases = None if one.biases is None else one.biases.astype(mx.float32)
    scales = one.scales if biases is None else one.scales.astype(mx.float32)
    return mx.dequantize(
        one.weight, scales, biases, one.group_size, one.bits, one.mode, dtype=mx.float32
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(7, 64), (3, 5, 64)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_blocks_make_up_the_whole(
    monkeypatch: pytest.MonkeyPatch, mode: str, shape: tuple[int, ...], dtype: mx.Dtype
) -> None:
    """Unpacked block by block, a tensor is what it is in one piece, in exact float32."""
    monkeypatch.setattr(packed, "BLOCK_BYTES", 2 * 64 * 4)
    one = pack(mode, shape, dtype)
    assert one.shape == shape and one.nbytes == 4 * whole(one).size
    plain = one.unpack()
    assert plain.dtype == mx.float32 and mx.array_equal(plain, whole(one)).item()


def test_scales_of_each_expert() -> None:
    """Where nvfp4 has one more scale per expert, each expert is unpacked with its own."""
    drawn = mx.random.normal((3, 8, 64), key=mx.random.key(3))
    scale = mx.max(mx.abs(drawn), axis=(1, 2))
    parts = [mx.quantize(drawn[e], 16, 4, mode="nvfp4", global_scale=scale[e]) for e in range(3)]
    one = Packed(
        mx.stack([w for w, _ in parts]),
        mx.stack([s for _, s in parts]),
        None,
        scale,
        16,
        4,
        "nvfp4",
    )
    expected = [
        mx.dequantize(w, s, None, 16, 4, "nvfp4", global_scale=scale[e], dtype=mx.float32)
        for e, (w, s) in enumerate(parts)
    ]
    assert mx.array_equal(one.unpack(), mx.stack(expected)).item()


@pytest.mark.parametrize("mode", MODES)
def test_unpacking_needs_little_beside_the_result(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The peak while a tensor is unpacked stays a few blocks above the tensor."""
    block = BLOCK_BYTES // 8
    monkeypatch.setattr(packed, "BLOCK_BYTES", block)
    one = pack(mode, (1024, 2048))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    plain = one.unpack()
    assert plain.nbytes >= 16 * block
    assert mx.get_peak_memory() - before <= plain.nbytes + 6 * block


def test_a_projection_with_the_table(tiny: Callable[..., Path]) -> None:
    """The table of a tied model is a plain embedding at both ends."""
    path = tiny("llama_tied", quantize="4:32")
    family = family_of(path)
    last = load_stage(family.open(path), family, 3, 6, "float32", dequantize=True)
    assert type(last.inner.embed_tokens) is nn.Embedding
