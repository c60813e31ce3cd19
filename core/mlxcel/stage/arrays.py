"""MLX arrays to and from the tensor wire format, bit for bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxcel.wire.tensor import DTYPES, WireTensor

_NAMES = {getattr(mx, "bool_" if name == "bool" else name): name for name in DTYPES}

# Neither Python's memoryview nor numpy knows bfloat16, and memoryview not complex: their bits
# travel as integers.
_BITS = {mx.bfloat16: mx.uint16, mx.complex64: mx.uint64}


def to_wire(array: mx.array) -> WireTensor:
    """``array`` of any shape and dtype as a view of its own memory.

    Evaluates the array, in the calling thread; copies only what is not contiguous.
    """
    bits = array.view(_BITS[array.dtype]) if array.dtype in _BITS else array
    view = memoryview(bits)  # type: ignore[arg-type]
    if not view.c_contiguous:
        view = memoryview(mx.contiguous(bits))  # type: ignore[arg-type]
    return WireTensor(_NAMES[array.dtype], tuple(array.shape), view.cast("B"))


def from_wire(tensor: WireTensor) -> mx.array:
    """The evaluated array that ``tensor`` holds; its data is copied once.

    ``tensor`` must be consistent, as ``wire.tensor.decode`` guarantees.
    """
    name = "uint16" if tensor.dtype == "bfloat16" else tensor.dtype
    values = np.frombuffer(tensor.data, dtype=name).reshape(tensor.shape)
    if tensor.dtype == "bfloat16":
        array = mx.array(values).view(mx.bfloat16)
        mx.eval(array)
        return array
    # numpy's float64 becomes float32 unless MLX is told.
    return mx.array(values, dtype=mx.float64 if name == "float64" else None)
