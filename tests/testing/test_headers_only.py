"""Checkpoints of real sizes without their weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model

from mlxcel.checkpoint.checkpoint import open_checkpoint
from mlxcel.family.transformer import flat_parameters
from mlxcel.testing.headers_only import write_headers
from mlxcel.testing.published import PUBLISHED
from mlxcel.testing.tiny.builder import RECIPES


def test_the_headers_are_of_mlx_lms_model(tmp_path: Path) -> None:
    """mlx-lm reads such a folder into the model that it was made of; its numbers are zero."""
    config = dict(RECIPES["llama"].config)
    path = write_headers(tmp_path, config, quantize="4:32:affine", dtype="F16")
    model, _ = load_model(path)
    parameters = flat_parameters(model)
    assert parameters.keys() == open_checkpoint(path).tensors.keys()
    assert {value.dtype for value in parameters.values()} == {mx.float16, mx.uint32}
    assert not any(mx.any(value).item() for value in parameters.values())
    assert json.loads((path / "config.json").read_text())["quantization"]["bits"] == 4


def test_what_mlx_lm_does_not_cast_is_float32(tmp_path: Path) -> None:
    """The bias that corrects a router's choice stays as it is on the hub."""
    path = write_headers(tmp_path, RECIPES["deepseek_v3"].config)
    kinds = {name: header.dtype for name, header in open_checkpoint(path).tensors.items()}
    own = {name for name, kind in kinds.items() if kind == "F32"}
    assert own == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3)}


def test_it_takes_no_room(tmp_path: Path) -> None:
    """The largest model is a file of its size that takes next to nothing on disk."""
    largest = max(PUBLISHED, key=lambda published: published.config.get("model_type") == "kimi_k3")
    path = write_headers(tmp_path, largest.config, quantize=largest.quantize)
    status = (path / "model.safetensors").stat()
    assert status.st_size > 1e12
    assert status.st_blocks * 512 < 1e7
    tensors = open_checkpoint(path).tensors
    assert sum(tensor.nbytes for tensor in tensors.values()) < status.st_size
    assert all(math.prod(tensor.shape) for tensor in tensors.values())
