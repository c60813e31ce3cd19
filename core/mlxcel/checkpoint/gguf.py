"""Read the header of a GGUF file: its metadata and what tensors it holds.

The format: magic, version, counts, then metadata as typed key-value pairs and tensor infos, then
the aligned tensor data. See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from mlxcel.errors import CheckpointError
from mlxcel.errors.words import counted

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_TYPE_NAMES = (  # by ggml's number of the type
    *("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S"),
    *("IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"),
)
_BLOCKS = {"F32": (1, 4), "F16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34)}


@attrs.frozen
class GgufTensor:
    """One tensor: ``type`` as ggml names it, ``shape`` row-major (outermost dimension first)."""

    name: str
    type: str
    shape: tuple[int, ...]


@attrs.frozen
class GgufFile:
    """What a GGUF file says of itself."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(file: Path) -> GgufFile:
    """The metadata and tensor infos of a GGUF file; no tensor is loaded.

    Metadata values become Python numbers, strings and lists.

    Raises:
        CheckpointError: The file cannot be read, is no GGUF file, is malformed or cut short.
    """
    try:
        with file.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(file, "is no GGUF file.", "Name a .gguf file.")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(file, data)
    except OSError as error:
        raise CheckpointError(
            file, f"cannot be read ({error.strerror}).", "Name a .gguf file."
        ) from error


def _read(file: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(file, data, len(MAGIC))
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise cursor.malformed(f"its version is {version}; known are {VERSIONS}")
    tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    tensors, end = {}, 0
    for _ in range(tensor_count):
        tensor, stop = _tensor(cursor)
        if tensor.name in tensors:
            raise cursor.malformed(f"the tensor {tensor.name!r} occurs twice")
        tensors[tensor.name] = tensor
        end = max(end, stop)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise cursor.malformed(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    if end and start + end > len(data):
        raise CheckpointError(
            file,
            f"is cut short by {counted(start + end - len(data), 'byte')}.",
            "Copy or download the file again.",
        )
    return GgufFile(file, metadata, tensors)


def _tensor(cursor: _Cursor) -> tuple[GgufTensor, int]:
    """The next tensor info, and where its bytes end (0 for a type of unknown size)."""
    name = cursor.string()
    dimensions = cursor.scalar("I")
    if dimensions > MAX_DIMENSIONS:
        raise cursor.malformed(f"the tensor {name!r} has {dimensions} dimensions")
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(dimensions)]))
    number, offset = cursor.scalar("I"), cursor.scalar("Q")
    type_name = _TYPE_NAMES[number] if number < len(_TYPE_NAMES) else f"type {number}"
    tensor = GgufTensor(name, type_name, shape)
    if tensor.type not in _BLOCKS:
        return tensor, 0
    per_block, block_bytes = _BLOCKS[tensor.type]
    if shape and shape[-1] % per_block:
        raise cursor.malformed(f"rows of the tensor {name!r} are no whole {tensor.type} blocks")
    return tensor, offset + math.prod(shape) // per_block * block_bytes


class _Cursor:
    """Reads little-endian values one after another, never past the end of the file."""

    def __init__(self, file: Path, data: mmap.mmap, at: int) -> None:
        self._file = file
        self._data = data
        self.at = at

    def scalar(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def string(self) -> str:
        text = self._bytes(self.scalar("Q"))
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self.malformed(f"a string is not UTF-8 ({error})") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.malformed(f"a value has the unknown type {kind}")
        items, count = self.scalar("I"), self.scalar("Q")
        if items == _STRING:
            return [self.string() for _ in range(count)]
        if items in _SCALARS:
            return list(self._numbers(_SCALARS[items], count))
        raise self.malformed(f"an array has items of the unknown type {items}")

    def malformed(self, what: str) -> CheckpointError:
        return CheckpointError(
            self._file, f"is a malformed GGUF file: {what}.", "Copy or download the file again."
        )

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        data = self._bytes(count * struct.calcsize(f"<{code}"))
        return struct.unpack(f"<{count}{code}", data)

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise self.malformed("it ends inside its header")
        self.at += count
        return self._data[self.at - count : self.at]
