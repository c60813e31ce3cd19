"""Small checkpoints on disk, written by hand so that the readers are not tested with themselves."""

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
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


GGML = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14}


def _gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _gguf_value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _gguf_string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_gguf_string, value))
        case _:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def _gguf_blocks(array: np.ndarray, kind: str) -> bytes:
    """The bytes of ``array`` in one of ggml's types, as its reference code packs them."""
    if kind in ("F32", "F16"):
        return array.astype({"F32": "<f4", "F16": "<f2"}[kind]).tobytes()
    out = b""
    for block in array.astype("f8").reshape(-1, 32):
        if kind == "Q8_0":
            scale = np.abs(block).max() / 127 or 1.0
            out += struct.pack("<e32b", scale, *np.round(block / scale).astype(int))
        elif kind == "Q4_1":
            scale = (block.max() - block.min()) / 15 or 1.0
            nibbles = np.clip(np.round((block - block.min()) / scale), 0, 15).astype(int)
            pairs = nibbles[:16] | nibbles[16:] << 4
            out += struct.pack("<ee16B", scale, block.min(), *pairs)
        else:
            out += bytes(1)
    return out


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    """Writes a GGUF file: metadata, and name to (array, ggml type)."""

    def write(
        file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, str]]
    ) -> Path:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
        head += b"".join(_gguf_string(key) + _gguf_value(value) for key, value in metadata.items())
        data = b""
        for name, (array, kind) in tensors.items():
            shape = reversed(array.shape)
            head += _gguf_string(name) + struct.pack(f"<I{array.ndim}Q", array.ndim, *shape)
            head += struct.pack("<IQ", GGML[kind], len(data))
            data += _gguf_blocks(array, kind)
            data += bytes(-len(data) % 32)
        file.write_bytes(head + bytes(-len(head) % 32) + data)
        return file

    return write
