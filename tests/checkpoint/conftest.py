"""Small checkpoints on disk, written by hand so that the readers are not tested with themselves."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "U32": 4, "U8": 1}
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


@pytest.fixture
def write_weights() -> Callable[[Path, Tensors], Path]:
    """Writes a safetensors file of zeros: name to (dtype, shape)."""

    def write(file: Path, tensors: Tensors) -> Path:
        header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        end = 0
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + math.prod(shape) * ITEMSIZE[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
        return file

    return write


@pytest.fixture
def write_checkpoint(
    tmp_path: Path, write_weights: Callable[[Path, Tensors], Path]
) -> Callable[..., Path]:
    """Writes a checkpoint folder with one weight file; keywords go into config.json."""

    def write(tensors: Tensors, **settings: Any) -> Path:
        config = {"model_type": "toy", "num_hidden_layers": 2, **settings}
        (tmp_path / "config.json").write_text(json.dumps(config))
        write_weights(tmp_path / "model.safetensors", tensors)
        return tmp_path

    return write
