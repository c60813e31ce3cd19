"""MLX arrays as flat numpy arrays, which can be sent, received into and added, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxcel.wire.tensor import DTYPES

Values = npt.NDArray[Any]

NAMES = {getattr(mx, "bool_" if name == "bool" else name): name for name in DTYPES}
"""What the wire format calls MLX's types."""


def values_of(x: mx.array) -> Values:
    """The elements of ``x``, evaluated, as a flat view of its memory where that is contiguous.

    bfloat16, which numpy does not know, comes as its bits in uint16.
    """
    bits = x.view(mx.uint16) if x.dtype == mx.bfloat16 else x
    mx.eval(bits)  # numpy would hold Python's lock while it waits
    return np.ascontiguousarray(np.array(bits, copy=False)).reshape(-1)


def array_of(values: Values, dtype: mx.Dtype, shape: Sequence[int]) -> mx.array:
    """The array of ``shape`` and ``dtype`` with ``values``, which are copied.

    That of bfloat16 is a view that is still to be evaluated, together with what uses it.
    """
    if dtype == mx.bfloat16:
        return mx.array(values.reshape(shape)).view(dtype)
    return mx.array(values.reshape(shape), dtype=dtype)


def empty(size: int, dtype: mx.Dtype) -> Values:
    """Room for ``size`` elements of ``dtype``."""
    return np.empty(size, "uint16" if dtype == mx.bfloat16 else NAMES[dtype])
