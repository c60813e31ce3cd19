"""Tiny checkpoints: complete, in hub naming, the same everywhere, and good to test with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxcel.testing import tiny as checkpoints
from mlxcel.testing.tiny.builder import RECIPES

Tiny = Callable[..., Path]

WITH_TRAILER = ("deepseek_v3_mtp", "deepseek_v3_mtp_counted")
"""mlx-lm would refuse the trailer's tensors: it knows them only as layer 61."""

PACKED = "gpt_oss"
"""Its hub checkpoint has experts in four bits."""

UNREAD = "gpt_oss_plain"
"""mlx-lm cannot read the hub's naming of plain experts; tests/families shows that we do."""

NAMES = tuple(name for name in checkpoints.names() if name != UNREAD)
every_name = pytest.mark.parametrize("name", NAMES)


def load(name: str, folder: Path) -> Any:
    model_config = dict(RECIPES[name].model_config)
    model, _ = load_model(folder, strict=name not in WITH_TRAILER, model_config=model_config)
    return model


def parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def assert_equal(found: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert mx.array_equal(found[name], value).item(), name


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def tensor_names(file: Path) -> set[str]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return set(json.loads(data[8 : 8 + length])) - {"__metadata__"}


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    cache = make_prompt_cache(model)
    tokens: list[int] = []
    step = prompt
    for _ in range(count):
        step = [int(mx.argmax(model(mx.array([step]), cache=cache)[0, -1]))]
        tokens += step
    return tokens


@every_name
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loading_gives_the_drawn_parameters(tiny: Tiny, name: str, dtype: str) -> None:
    """mlx-lm reads from the files exactly the parameters that were drawn."""
    folder = tiny(name, dtype=dtype)
    drawn = checkpoints.draw_model(name, dtype=dtype)
    found, expected = parameters(load(name, folder)), parameters(drawn)
    if name == PACKED:
        assert any(path.endswith(".experts.up_proj.scales") for path in found)
        found, expected = (
            {path: value for path, value in each.items() if ".experts." not in path}
            for each in (found, expected)
        )
    assert_equal(found, expected)


@every_name
def test_the_same_bytes_every_time(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Building twice gives identical files."""
    assert digests(checkpoints.build(name, tmp_path / "again")) == digests(tiny(name))


def test_the_same_numbers_everywhere(tiny: Tiny) -> None:
    """The bytes of one checkpoint are written down here, so another machine's differ visibly."""
    weights = digests(tiny("llama"))["model.safetensors"]
    assert weights == "83ad182157ae06eb4621587e1ab6a4c5ce9a9d9171256821588425d79f275038"


@every_name
@pytest.mark.parametrize("quantize", [None, "4:32"])
def test_greedy_output_varies(tiny: Tiny, name: str, quantize: str | None) -> None:
    """Greedy decoding does not fall into one token: a test on tokens would prove nothing."""
    model = load(name, tiny(name, quantize=quantize))
    tokens = greedy(model, list(b"Hello, world! abc"), 8)
    assert len(set(tokens)) >= 5, tokens


@every_name
@pytest.mark.parametrize("quantize", ["4:32", "4:64", "4:32:mxfp4", "8:32:mxfp8", "4:16:nvfp4"])
def test_quantized_checkpoints_load_and_run(tiny: Tiny, name: str, quantize: str) -> None:
    """Every mode is stored as mlx-lm's conversion stores it and gives finite logits."""
    folder = tiny(name, quantize=quantize)
    model = load(name, folder)
    bits, group, *_ = quantize.split(":")
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"]["bits"] == int(bits)
    assert config["quantization"]["group_size"] == int(group)
    assert any(parameter.endswith(".scales") for parameter in parameters(model))
    logits = model(mx.array([list(b"abc")]))
    assert np.isfinite(np.array(logits)).all()


def test_overrides_give_single_layers_their_own_bits(tiny: Tiny) -> None:
    """Patterns of module paths set bits, or keep a module as it is; the first one counts."""
    folder = tiny(
        "gemma4_moe",
        quantize="4:32:mxfp4",
        overrides={
            "*.layers.0.self_attn.q_proj": "none",
            "*.layers.0.*": "6:32",
            "*.self_attn.*": "8:64",
        },
    )
    layers = load("gemma4_moe", folder).layers
    assert not hasattr(layers[0].self_attn.q_proj, "bits")
    assert (layers[0].mlp.up_proj.bits, layers[0].mlp.up_proj.mode) == (6, "affine")
    assert (layers[1].self_attn.q_proj.bits, layers[1].self_attn.q_proj.group_size) == (8, 64)
    assert layers[1].experts.switch_glu.up_proj.mode == "mxfp4"
    assert layers[1].router.proj.bits == 8, "the family's own rule stands where none fits"


@pytest.mark.parametrize("quantize", [None, "4:32"])
@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_shards_and_index(tiny: Tiny, name: str, quantize: str | None) -> None:
    """The index names for each tensor the file that holds it, and the sum of their bytes."""
    folder = tiny(name, quantize=quantize, shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for file in files:
        listed = {tensor for tensor, place in index["weight_map"].items() if place == file.name}
        assert listed == tensor_names(file)
    loaded = mx.load(str(files[0])) | mx.load(str(files[1])) | mx.load(str(files[2]))
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in loaded.values())
    whole = load(name, tiny(name, quantize=quantize))
    assert_equal(parameters(load(name, folder)), parameters(whole))


@pytest.mark.parametrize(
    ("name", "tied", "head"),
    [
        ("llama", False, True),
        ("llama_tied", True, False),
        ("llama_tied_head", True, True),
        ("llama_untied_headless", False, False),
    ],
)
def test_the_four_forms_of_tying(tiny: Tiny, name: str, tied: bool, head: bool) -> None:
    """config.json says tied or not, and the file has a head or not, in all combinations."""
    folder = tiny(name)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in tensor_names(folder / "model.safetensors")) is head


def test_tied_forms_are_one_model(tiny: Tiny) -> None:
    """The three tied forms hold the same model, so their outputs can be compared."""
    names = ("llama_tied", "llama_tied_head", "llama_untied_headless")
    first, *others = (parameters(load(name, tiny(name))) for name in names)
    for other in others:
        assert_equal(other, first)


@pytest.mark.parametrize("name", ["gemma4", "llama4", "qwen3_5"])
def test_the_vision_tower_is_a_trap(tiny: Tiny, name: str) -> None:
    """A _vlm checkpoint is the plain one, a vision_config and tensors that are not numbers."""
    folder = tiny(f"{name}_vlm")
    assert "vision_config" in json.loads((folder / "config.json").read_text())
    tensors = mx.load(str(folder / "model.safetensors"))
    extra = tensor_names(folder / "model.safetensors") - tensor_names(
        tiny(name) / "model.safetensors"
    )
    assert extra
    assert all(mx.isnan(tensors[name]).all().item() for name in extra)
    assert_equal(parameters(load(f"{name}_vlm", folder)), parameters(load(name, tiny(name))))


@pytest.mark.parametrize("name", WITH_TRAILER)
def test_the_trailer_is_a_trap(tiny: Tiny, name: str) -> None:
    """Both forms are deepseek_v3 plus one more layer whose tensors are not numbers."""
    folder, plain = tiny(name), tiny("deepseek_v3")
    tensors = mx.load(str(folder / "model.safetensors"))
    extra = tensors.keys() - tensor_names(plain / "model.safetensors")
    assert {tensor.split(".")[2] for tensor in extra} == {"4"}
    assert all(mx.isnan(tensors[tensor]).all().item() for tensor in extra)
    assert_equal(parameters(load(name, folder)), parameters(load("deepseek_v3", plain)))


@pytest.mark.parametrize(
    "options",
    [
        {"name": "no such"},
        {"name": "llama", "dtype": "int8"},
        {"name": "llama", "shards": 0},
        {"name": "llama", "overrides": {"*": "6:32"}},
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """Unknown names, dtypes and shard counts raise ValueError."""
    with pytest.raises(ValueError, match=r"no such|int8|0 files|quantize"):
        checkpoints.build(out=tmp_path, **options)
