"""Read the header of a safetensors file, and nothing else of it.

The format: 8 bytes little-endian header length, a JSON object ``{name: {"dtype", "shape",
"data_offsets": [begin, end]}}`` with an optional ``__metadata__``, then the tensors' bytes.
See https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs

from mlxcel.errors import CheckpointError
from mlxcel.errors.words import counted

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 16

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "I16": 16,
    "U16": 16,
    "I32": 32,
    "U32": 32,
    "I64": 64,
    "U64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
}
"""Bits per element of each safetensors dtype."""

_AGAIN = "Copy or download the file again."
_LFS_POINTER = b"version https://git-lfs"


@attrs.frozen
class TensorHeader:
    """One tensor as its file describes it.

    Attributes:
        name: The name in the checkpoint.
        dtype: The safetensors name of its type, a key of :data:`DTYPE_BITS`.
        shape: Its dimensions; empty for a scalar.
        nbytes: Bytes it takes in the file.
        file: The safetensors file that holds it.
        offset: Bytes of the file before it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int = 0


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file by name, in the file's order, without loading any.

    Raises:
        CheckpointError: The file cannot be read, is cut short (the error says by how many
            bytes), or its header is not what the format allows.
    """
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) == 8 and length <= min(MAX_HEADER_BYTES, size - 8):
                header = stream.read(length)
            elif (start + stream.read(64)).startswith(_LFS_POINTER):
                raise CheckpointError(
                    file, "is a Git LFS pointer, not the weights.", "Fetch them: `git lfs pull`."
                )
            elif len(start) < 8 or length <= MAX_HEADER_BYTES:
                missing = 8 + length - size if len(start) == 8 else 8 - size
                raise CheckpointError(
                    file, f"is cut short by at least {counted(missing, 'byte')}.", _AGAIN
                )
            else:
                raise CheckpointError(
                    file,
                    f"is no safetensors file: it claims a header of {length} bytes.",
                    "Use weights in the safetensors format.",
                )
    except OSError as error:
        raise CheckpointError(file, f"cannot be read ({error.strerror}).", _AGAIN) from error
    return _parse(header, data_start=8 + length, data_bytes=size - 8 - length, file=file)


def _parse(header: bytes, data_start: int, data_bytes: int, file: Path) -> dict[str, TensorHeader]:
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _malformed(file, f"not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _malformed(file, "not a JSON object")
    entries.pop("__metadata__", None)
    tensors, spans = {}, []
    for name, entry in entries.items():
        tensor = _tensor(name, entry, data_start, file)
        tensors[name] = tensor
        spans.append((tensor.offset, tensor.offset + tensor.nbytes, name))
    spans.sort()
    end, last = data_start, ""
    for begin, stop, name in spans:
        if begin < end:
            raise _malformed(file, f"tensors {last!r} and {name!r} overlap")
        end, last = stop, name
    if missing := max(0, end - data_start - data_bytes):
        raise CheckpointError(file, f"is cut short by {counted(missing, 'byte')}.", _AGAIN)
    return tensors


def _tensor(name: str, entry: Any, data_start: int, file: Path) -> TensorHeader:
    if not isinstance(entry, dict):
        raise _malformed(file, f"tensor {name!r} is no object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    span: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _malformed(file, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise _malformed(file, f"tensor {name!r} has no valid shape")
    if not _counts(span) or len(span) != 2 or span[0] > span[1]:
        raise _malformed(file, f"tensor {name!r} has no valid data_offsets")
    nbytes = span[1] - span[0]
    if nbytes * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        raise _malformed(file, f"tensor {name!r} is {dtype} {shape} but holds {nbytes} bytes")
    return TensorHeader(name, dtype, tuple(shape), nbytes, file, data_start + span[0])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _malformed(file: Path, what: str) -> CheckpointError:
    return CheckpointError(file, f"has a malformed safetensors header: {what}.", _AGAIN)
