"""MLX arrays over the wire, bit for bit."""

import mlx.core as mx
import numpy as np
import pytest

from mlxcel.stage.arrays import from_wire, to_wire
from mlxcel.wire.tensor import DTYPES, WireTensor, decode, encode

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def mlx_dtype(name: str) -> mx.Dtype:
    return mx.bool_ if name == "bool" else getattr(mx, name)


def bits(array: mx.array) -> bytes:
    """The memory of an array in row-major order."""
    flat = mx.contiguous(array).reshape(-1)
    unsigned = getattr(mx, f"uint{8 * array.dtype.size}")
    return bytes(memoryview(flat if array.dtype == mx.bool_ else flat.view(unsigned)))


def some_array(name: str, shape: tuple[int, ...]) -> mx.array:
    """An array of this dtype with arbitrary bits."""
    generator = np.random.default_rng(7)
    if name == "bool":
        return mx.array(generator.integers(0, 2, shape).astype(bool))
    size = DTYPES[name].itemsize
    noise = generator.integers(0, 256, (*shape, size), dtype=np.uint8).view(BITS[size])
    return mx.array(noise.reshape(shape)).view(mlx_dtype(name))


def over_the_wire(array: mx.array) -> mx.array:
    """The array after encoding and decoding; the odd offset makes the data unaligned."""
    buffer = b"x" + b"".join(encode(to_wire(array)))
    tensor, end = decode(buffer, 1)
    assert end == len(buffer)
    return from_wire(tensor)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3, 5), (1,) * 8])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_round_trip(name: str, shape: tuple[int, ...]) -> None:
    """Every dtype and rank comes back with the same type, shape and bits."""
    array = some_array(name, shape)
    back = over_the_wire(array)
    assert (back.dtype, back.shape) == (array.dtype, shape)
    assert bits(back) == bits(array)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[:, 1:3],
        lambda a: a[1:],
        lambda a: a[::-1],
        lambda a: a[:, ::2],
        lambda a: mx.broadcast_to(a[:1], (3, *a.shape[1:])),
    ],
    ids=["transposed", "columns", "rows", "reversed", "strided", "broadcast"],
)
def test_views_are_sent_in_row_major_order(name: str, view) -> None:
    """What is not contiguous arrives as the values it shows."""
    array = view(some_array(name, (4, 6)))
    back = over_the_wire(array)
    assert back.shape == array.shape
    assert bits(back) == bits(array)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("float16", b"\x01\x7c\x00\x80"),
        ("bfloat16", b"\x81\x7f\x00\x80"),
        ("float32", b"\x01\x00\x80\x7f\x00\x00\x00\x80"),
        ("float64", b"\x01\0\0\0\0\0\xf0\x7f\0\0\0\0\0\0\0\x80"),
        ("complex64", b"\x01\x00\x80\x7f\x00\x00\x00\x80\x00\x00\x00\x80\x23\x01\xc0\xff"),
    ],
)
def test_nan_payloads_and_negative_zeros_survive(name: str, pattern: bytes) -> None:
    """No value is normalised on the way, in or out."""
    array = from_wire(WireTensor(name, (2,), pattern))
    assert array.dtype == mlx_dtype(name)
    assert bytes(to_wire(array).data) == pattern


def test_a_contiguous_array_is_not_copied() -> None:
    """What is sent is a view of the array's own memory."""
    array = mx.array([1.0, 2.0])
    assert np.shares_memory(
        np.frombuffer(to_wire(array).data, np.float32), np.asarray(memoryview(array))
    )


def test_a_received_array_is_its_own() -> None:
    """The buffer that it came in can be used again at once."""
    buffer = bytearray(b"".join(encode(to_wire(mx.array([1.5, 2.5], dtype=mx.bfloat16)))))
    array = from_wire(decode(buffer)[0])
    buffer[-4:] = b"\0\0\0\0"
    assert array.tolist() == [1.5, 2.5]


def test_a_lazy_array_is_evaluated_to_be_sent() -> None:
    """The sum is computed, then sent."""
    assert over_the_wire(mx.array([1, 2]) + mx.array([3, 4])).tolist() == [4, 6]
