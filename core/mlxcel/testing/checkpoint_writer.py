"""Writing checkpoints in the hub's layout, tensor by tensor.

The same input gives the same bytes everywhere: MLX's own writer orders the tensors of a
file by a hash table, which differs between platforms.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U32": 4, "I32": 4, "U8": 1}


@attrs.frozen
class TensorSpec:
    """One tensor of a file: its safetensors dtype name (``"BF16"``) and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)


def write_checkpoint(
    out: Path,
    tensors: Mapping[str, TensorSpec],
    read: Callable[[str], bytes] | None,
    *,
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
    format: str = "pt",
) -> Path:
    """Write config.json and ``model*.safetensors`` with their index into the folder ``out``.

    Args:
        out: Made if need be.
        tensors: In the order in which they are to stand in the files.
        read: Gives a tensor's bytes when it is its turn, so that one at a time is in memory.
            None leaves a hole of their size instead, which takes no room on disk.
        config: The content of config.json; none is written without it.
        shards: The number of files; consecutive tensors share one.
        format: The files' metadata, ``"pt"`` on the hub and ``"mlx"`` when converted.

    Returns:
        ``out``.
    """
    if not 1 <= shards <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors cannot be written into {shards} files")
    out.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        part = names[index * len(names) // shards : (index + 1) * len(names) // shards]
        file = (
            "model.safetensors"
            if shards == 1
            else f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        )
        _write_safetensors(out / file, part, tensors, read, format)
        weight_map |= dict.fromkeys(part, file)
    _write_json(
        out / "model.safetensors.index.json",
        {
            "metadata": {"total_size": sum(spec.bytes for spec in tensors.values())},
            "weight_map": dict(sorted(weight_map.items())),
        },
    )
    if config is not None:
        _write_json(out / "config.json", config)
    return out


def _write_safetensors(
    file: Path,
    names: Sequence[str],
    tensors: Mapping[str, TensorSpec],
    read: Callable[[str], bytes] | None,
    format: str,
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": format}}
    end = 0
    for name in names:
        spec = tensors[name]
        begin, end = end, end + spec.bytes
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        if read is None:
            stream.truncate(8 + len(text) + end)
            return
        for name in names:
            data = read(name)
            if len(data) != tensors[name].bytes:
                raise ValueError(f"{name}: {len(data)} bytes for {tensors[name]}")
            stream.write(data)


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
