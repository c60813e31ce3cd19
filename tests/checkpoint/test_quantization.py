import json
from pathlib import Path
from typing import Any

import pytest

from mlxcel.checkpoint.config import read_config
from mlxcel.checkpoint.quantization import (
    Quantization,
    QuantizationMap,
    canonical,
    read_quantization,
)
from mlxcel.errors import CheckpointError


def read(folder: Path, **settings: Any) -> QuantizationMap | None:
    config = {"model_type": "toy", "num_hidden_layers": 2, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return read_quantization(read_config(folder))


def test_plain_weights(tmp_path: Path) -> None:
    """Without settings there is no map."""
    assert read(tmp_path) is None
    assert read(tmp_path, quantization=None, quantization_config=None) is None


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_where_settings_stand(tmp_path: Path, key: str, nested: bool) -> None:
    """Both keys are read, at the top and in the text settings."""
    settings: dict[str, Any] = {key: {"group_size": 32, "bits": 6}}
    if nested:
        settings = {"text_config": settings}
    found = read(tmp_path, **settings)
    assert found == QuantizationMap(32, 6, "affine", {})


def test_overrides_match_under_renamed_prefixes(tmp_path: Path) -> None:
    """An override applies to its module under any of the model's prefixes, and to no other."""
    found = read(
        tmp_path,
        quantization={
            "group_size": 64,
            "bits": 4,
            "language_model.model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 6},
            "model.layers.1.mlp.experts": {"mode": "mxfp4"},
            "lm_head": False,
            "model.embed_tokens": True,
        },
    )
    assert found is not None
    assert found.for_path("model.layers.0.mlp.up_proj") == Quantization(32, 6)
    assert found.for_path("layers.0.mlp.up_proj") == Quantization(32, 6)
    assert found.for_path("model.layers.1.mlp.up_proj") == Quantization(64, 4)
    assert found.for_path("language_model.layers.1.mlp.experts") == Quantization(32, 4, "mxfp4")
    assert found.for_path("language_model.lm_head") is None
    assert found.for_path("embed_tokens") == Quantization(64, 4)


def test_unused_overrides_are_reported(tmp_path: Path) -> None:
    """Override keys that match no module come back as the configuration writes them."""
    found = read(
        tmp_path,
        quantization={
            "bits": 4,
            "group_size": 64,
            "model.layers.0.a": {"bits": 8},
            "model.layers.9.typo": False,
        },
    )
    assert found is not None
    assert found.unused(["language_model.model.layers.0.a", "b"]) == ("model.layers.9.typo",)


def test_contradicting_overrides(tmp_path: Path) -> None:
    """Two overrides of one module under two prefixes must agree."""
    agree = {"bits": 4, "model.a": {"bits": 8}, "language_model.a": {"bits": 8}}
    assert read(tmp_path, quantization=agree) is not None
    with pytest.raises(CheckpointError, match=r"'model\.a' and 'language_model\.a'"):
        read(tmp_path, quantization={**agree, "language_model.a": {"bits": 6}})


def test_canonical_path() -> None:
    """Only whole segments named model or language_model fall away."""
    assert canonical("language_model.model.layers.0.x") == "layers.0.x"
    assert canonical("vision_model.remodel.x") == "vision_model.remodel.x"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "mxfp4"}, (32, 4, "mxfp4")),
        ({"quant_method": "mxfp8"}, (32, 8, "mxfp8")),
        (
            {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]},
            (32, 8, "mxfp8"),
        ),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            (16, 4, "nvfp4"),
        ),
        (
            {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
            (32, 4, "mxfp4"),
        ),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, (32, 4, "affine")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (16, 4, "nvfp4")),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, (64, 4, "affine")),
        ({"quant_method": "gptq", "bits": 4}, (128, 4, "affine")),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (None, None, None)),
        ({"quant_method": "bitnet"}, (None, None, None)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, (None, None, None)),
    ],
)
def test_formats_of_other_tools(
    tmp_path: Path, settings: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """Foreign formats are read as what they become in MLX, and keep their method's name."""
    found = read(tmp_path, quantization_config=settings)
    assert found is not None
    assert (found.group_size, found.bits, found.mode) == expected
    assert found.method == settings["quant_method"]
    assert (found.for_path("x") is None) == (expected[0] is None)


def test_modelopt_file(tmp_path: Path) -> None:
    """ModelOpt's own file beside config.json counts when config.json says nothing."""
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}})
    )
    found = read(tmp_path)
    assert found == QuantizationMap(16, 4, "nvfp4", {}, "modelopt")


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ("q4", "not an object"),
        ({"mode": "q5k"}, "unknown mode 'q5k'"),
        ({"mode": ["affine"]}, "unknown mode"),
        ({"bits": 7}, "7 bits"),
        ({"bits": True}, "True bits"),
        ({"bits": 4.0}, r"4\.0 bits"),
        ({"group_size": 48}, "groups of 48"),
        ({"mode": "mxfp4", "group_size": 64}, "mxfp4"),
        ({"bits": 4, "model.x": {"mode": "q5k"}}, r"model\.x has the unknown mode"),
        ({"quant_method": 3}, "quant_method"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
        ({"quant_method": "awq", "bits": 3}, "4 bits only"),
    ],
)
def test_refused_settings(tmp_path: Path, settings: Any, what: str) -> None:
    """What MLX has no kernel for is refused by name, in a default or an override."""
    with pytest.raises(CheckpointError, match=what):
        read(tmp_path, quantization=settings)


@pytest.mark.parametrize("inside", [False, True])
def test_quantized_activations(tmp_path: Path, inside: bool) -> None:
    """A model that wants its activations quantized is refused with the field to change."""
    settings: dict[str, Any] = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    asked = {"quantize_activations": True}
    config = {"quantization": settings | asked} if inside else {"quantization": settings} | asked
    with pytest.raises(CheckpointError, match="Set quantize_activations to false"):
        read(tmp_path, **config)
    found = read(tmp_path, quantization={**settings, "quantize_activations": False})
    assert found == QuantizationMap(32, 8, "mxfp8")
