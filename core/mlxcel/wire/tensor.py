"""The tensor wire format: a self-describing header, then the raw bytes.

All numbers are little-endian, dimensions in row-major order::

    u8   kind          1: a dense tensor
    u8   dtype         see DTYPES
    u8   ndim          0 to 8
    u64  dims[ndim]    each at least 1
    u64  length        of the data, = product of dims x item size
    ...  data

A reader checks every field before it trusts the next, and allocates nothing: what it
returns is a view of the buffer that it was given.
"""

from __future__ import annotations

import math
import struct

import attrs

from mlxcel.errors import WireError

DENSE = 1
MAX_DIMS = 8
MAX_BYTES = 1 << 30
"""The largest tensor that is accepted unless the reader says otherwise: 1 GiB."""

Buffer = bytes | bytearray | memoryview

_PREFIX = struct.Struct("<BBB")
_SIZES = tuple(struct.Struct(f"<{ndim + 1}Q") for ndim in range(MAX_DIMS + 1))
"""The dimensions and the length behind them, by the number of dimensions."""


@attrs.frozen
class Dtype:
    """One element type of the format: its ``code`` in the header, its size in bytes."""

    name: str
    code: int
    itemsize: int


_BY_CODE = {
    code: Dtype(name, code, itemsize)
    for code, (name, itemsize) in enumerate(
        [
            ("bool", 1),
            ("uint8", 1),
            ("uint16", 2),
            ("uint32", 4),
            ("uint64", 8),
            ("int8", 1),
            ("int16", 2),
            ("int32", 4),
            ("int64", 8),
            ("float16", 2),
            ("bfloat16", 2),
            ("float32", 4),
            ("float64", 8),
            ("complex64", 8),
        ],
        start=1,
    )
}

DTYPES = {dtype.name: dtype for dtype in _BY_CODE.values()}
"""All element types by name. The codes never change; new types get new ones."""


@attrs.frozen
class WireTensor:
    """A dense row-major tensor as bytes; ``data`` is flat, of ``product(shape) x itemsize``."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


def encode(tensor: WireTensor) -> tuple[bytes, Buffer]:
    """The header and the data of ``tensor``, to be sent one after the other; nothing is copied.

    Raises:
        WireError: The fields do not agree, or the format has no room for them.
    """
    return header(tensor), tensor.data


def header(tensor: WireTensor) -> bytes:
    """What stands before the data of ``tensor``.

    Raises:
        WireError: The fields do not agree, or the format has no room for them.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise WireError(f"there is no tensor dtype {tensor.dtype!r}")
    data = tensor.data
    length = data.nbytes if isinstance(data, memoryview) else len(data)
    _check_shape(dtype, tensor.shape, length)
    ndim = len(tensor.shape)
    return _PREFIX.pack(DENSE, dtype.code, ndim) + _SIZES[ndim].pack(*tensor.shape, length)


def decode(
    buffer: Buffer, offset: int = 0, *, max_bytes: int = MAX_BYTES
) -> tuple[WireTensor, int]:
    """The tensor that begins at ``offset`` of ``buffer``, and the offset behind it.

    The tensor's data is a view of ``buffer``. ``max_bytes`` bounds the data. Bytes behind the
    tensor are the caller's: whoever expects none compares the returned offset with the length.

    Raises:
        WireError: The bytes are not a whole, consistent tensor within the cap.
    """
    view = flat(buffer)
    position = _advance(view, offset, _PREFIX.size, "a tensor's header")
    kind, code, ndim = _PREFIX.unpack_from(view, offset)
    if kind != DENSE:
        raise WireError(f"unknown tensor kind {kind}")
    dtype = _BY_CODE.get(code)
    if dtype is None:
        raise WireError(f"unknown tensor dtype code {code}")
    if ndim > MAX_DIMS:
        raise WireError(f"a tensor of {ndim} dimensions; {MAX_DIMS} are allowed")
    sizes = _SIZES[ndim]
    start = _advance(view, position, sizes.size, "a tensor's dimensions")
    *dims, length = sizes.unpack_from(view, position)
    shape = tuple(dims)
    _check_shape(dtype, shape, length)
    if length > max_bytes:
        raise WireError(f"a tensor of {length} bytes; {max_bytes} are allowed")
    end = _advance(view, start, length, "a tensor's data")
    data = view[start:end]
    if dtype.name == "bool" and bytes(data).translate(None, b"\0\1"):
        raise WireError("a bool tensor holds something else than 0 and 1")
    return WireTensor(dtype.name, shape, data), end


def flat(buffer: Buffer) -> memoryview:
    """A one-dimensional view of the bytes of ``buffer``, which must be contiguous."""
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _advance(view: memoryview, position: int, size: int, what: str) -> int:
    """The position behind the next ``size`` bytes, which must exist."""
    if not 0 <= position <= len(view) or size > len(view) - position:
        raise WireError(f"the data ends within {what}")
    return position + size


def _check_shape(dtype: Dtype, shape: tuple[int, ...], length: int) -> None:
    if len(shape) > MAX_DIMS:
        raise WireError(f"a tensor of {len(shape)} dimensions; {MAX_DIMS} are allowed")
    if shape and min(shape) < 1:
        raise WireError(f"a tensor of shape {shape}; no dimension may be empty")
    if math.prod(shape) * dtype.itemsize != length:
        raise WireError(f"{length} bytes cannot be a {dtype.name} tensor of shape {shape}")
