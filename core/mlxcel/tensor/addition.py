"""Sums of flat numpy arrays as all ranks make them: float16 and bfloat16 are added in float32."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxcel.tensor.values import Values


def add(a: Values, b: Values, dtype: mx.Dtype, out: Values) -> None:
    """Put ``a + b`` into ``out``, all of ``dtype``; bfloat16 as bits, rounded to nearest even."""
    if dtype == mx.bfloat16:
        out[:] = _round(_widen(a) + _widen(b))
    else:
        np.add(a, b, out=out)  # numpy adds float16 in float32 itself


def total(parts: Sequence[Values], dtype: mx.Dtype) -> Values:
    """The sum of ``parts`` in their order, rounded once."""
    if dtype == mx.bfloat16:
        return _round(_sum([_widen(part) for part in parts]))
    if dtype == mx.float16:
        return _sum([part.astype(np.float32) for part in parts]).astype(np.float16)
    return _sum(parts)


def _sum(parts: Sequence[Values]) -> Values:
    first, second, *others = parts
    result: Values = first + second
    for part in others:
        result += part
    return result


def _widen(bits: Values) -> Values:
    """float32 with the values of bfloat16 ``bits``."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def _round(values: Values) -> Values:
    """The bits of the bfloat16 nearest to each of float32 ``values``, which it overwrites.

    No NaN of a sum of bfloat16 has low bits that could carry into its sign.
    """
    bits = values.view(np.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16).astype(np.uint16)
