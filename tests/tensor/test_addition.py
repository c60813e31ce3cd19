"""Sums of half-precision numbers, against MLX."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel.tensor.addition import add, total
from mlxcel.tensor.values import array_of, empty, values_of

SPECIAL = [0.0, -0.0, 1.0, -1.0, 3.0e38, -3.0e38, 1e-40, float("inf"), float("-inf"), float("nan")]


def numbers(dtype: mx.Dtype, seed: int) -> mx.array:
    scale = mx.exp(4 * mx.random.normal((5000,), key=mx.random.key(seed)))
    return (mx.random.normal((5000,), key=mx.random.key(seed + 1)) * scale).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_two_are_added_in_float32_and_rounded_once(dtype: mx.Dtype) -> None:
    """To nearest even, in every bit."""
    a, b = numbers(dtype, 1), numbers(dtype, 3)
    out = empty(a.size, dtype)
    add(values_of(a), values_of(b), dtype, out)
    expected = (a.astype(mx.float32) + b.astype(mx.float32)).astype(dtype)
    assert mx.array_equal(array_of(out, dtype, a.shape), expected)
    assert np.array_equal(total([values_of(a), values_of(b)], dtype), out)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_many_are_rounded_once(dtype: mx.Dtype) -> None:
    """The sum of many in their order, not of rounded sums."""
    parts = [numbers(dtype, seed) for seed in range(4)]
    expected = parts[0].astype(mx.float32)
    for part in parts[1:]:
        expected = expected + part.astype(mx.float32)
    sums = array_of(total([values_of(part) for part in parts], dtype), dtype, (5000,))
    assert mx.array_equal(sums, expected.astype(dtype))


def test_numbers_that_are_none_stay_so() -> None:
    """Infinities, zeros with a sign and NaN go through bfloat16 as through float32."""
    a = mx.array([x for x in SPECIAL for _ in SPECIAL]).astype(mx.bfloat16)
    b = mx.array(SPECIAL * len(SPECIAL)).astype(mx.bfloat16)
    out = empty(a.size, mx.bfloat16)
    with np.errstate(all="ignore"):
        add(values_of(a), values_of(b), mx.bfloat16, out)
    result = array_of(out, mx.bfloat16, a.shape).astype(mx.float32)
    expected = (a.astype(mx.float32) + b.astype(mx.float32)).astype(mx.bfloat16)
    assert mx.array_equal(result, expected.astype(mx.float32), equal_nan=True)
