"""Random Llama checkpoints: of the size asked for, readable, of sane numbers."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxcel.testing import random_llama


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [False, True])
def test_size_and_content(tmp_path: Path, dtype: str, tied: bool) -> None:
    """The tensors take at least the bytes asked for, load, and give finite varied logits."""
    folder = random_llama(
        tmp_path, megabytes=6, layers=3, hidden=128, vocab=300, tied=tied, dtype=dtype, shards=2
    )
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 2
    arrays = [array for file in files for array in mx.load(str(file)).values()]
    assert 6e6 <= sum(array.nbytes for array in arrays) <= 7e6
    assert {str(array.dtype) for array in arrays} == {f"mlx.core.{dtype}"}
    model, _ = load_model(folder)
    logits = np.array(model(mx.array([[1, 2, 3]])).astype(mx.float32))
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"hidden": 100}, {"vocab": 10}])
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    """A dtype or size that cannot be made raises ValueError."""
    with pytest.raises(ValueError, match=r"dtype|hidden"):
        random_llama(tmp_path, megabytes=1, **options)  # type: ignore[arg-type]
