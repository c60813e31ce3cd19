"""Random DeepSeek V3 checkpoints: of the size asked for, readable, of sane numbers."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxcel.testing import random_deepseek


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_size_and_content(tmp_path: Path, dtype: str) -> None:
    """The tensors take at least the bytes asked for, load, and give finite varied logits."""
    options = {"layers": 3, "hidden": 128, "vocab": 300, "shards": 2}
    folder = random_deepseek(tmp_path, megabytes=12, dtype=dtype, **options)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 2
    tensors = {name: value for file in files for name, value in mx.load(str(file)).items()}
    assert 12e6 <= sum(value.nbytes for value in tensors.values()) <= 20e6
    assert {str(value.dtype) for value in tensors.values()} == {f"mlx.core.{dtype}"}
    assert "model.layers.2.mlp.experts.15.down_proj.weight" in tensors
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)  # the only one in which a CPU multiplies plain experts
    logits = np.array(model(mx.array([[1, 2, 3]])))
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10


@pytest.mark.parametrize(
    "options", [{"dtype": "float16"}, {"hidden": 100}, {"vocab": 10}, {"layers": 1}, {"experts": 2}]
)
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    """A dtype or size that cannot be made raises ValueError."""
    with pytest.raises(ValueError, match=r"dtype|hidden"):
        random_deepseek(tmp_path, megabytes=1, **options)  # type: ignore[arg-type]
