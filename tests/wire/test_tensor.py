"""The tensor wire format: exact round trips, and nothing but WireError for other bytes."""

import math
import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.errors import WireError
from mlxcel.wire.tensor import DTYPES, MAX_DIMS, WireTensor, decode, encode, header

shapes = st.lists(st.integers(1, 4), max_size=MAX_DIMS).filter(lambda s: math.prod(s) < 500)


@st.composite
def tensors(draw: st.DrawFn) -> WireTensor:
    """Any valid tensor with any bytes."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(shapes)
    length = math.prod(shape) * DTYPES[dtype].itemsize
    data = draw(st.binary(min_size=length, max_size=length))
    if dtype == "bool":
        data = bytes(byte & 1 for byte in data)
    return WireTensor(dtype, tuple(shape), data)


def raw(kind: int = 1, code: int = 12, dims: tuple[int, ...] = (2,), length: int = 8) -> bytes:
    """A hand-made header, by default of two float32."""
    return struct.pack(f"<BBB{len(dims) + 1}Q", kind, code, len(dims), *dims, length)


def test_the_layout_is_fixed() -> None:
    """The bytes on the wire are a contract between versions."""
    tensor = WireTensor("float32", (1, 2), b"12345678")
    assert b"".join(encode(tensor)) == (
        bytes.fromhex("01 0c 02 0100000000000000 0200000000000000 0800000000000000") + b"12345678"
    )
    assert [dtype.code for dtype in DTYPES.values()] == list(range(1, 15))
    assert (
        list(DTYPES)
        == (
            "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 "
            "float16 bfloat16 float32 float64 complex64"
        ).split()
    )


@given(st.lists(tensors(), min_size=1, max_size=3), st.binary(max_size=5))
def test_round_trip(several: list[WireTensor], prefix: bytes) -> None:
    """Tensors that follow each other are read back bit for bit, wherever they begin."""
    buffer = prefix + b"".join(b"".join(encode(tensor)) for tensor in several)
    offset = len(prefix)
    for tensor in several:
        read, offset = decode(buffer, offset)
        assert read == tensor
    assert offset == len(buffer)


def test_nothing_is_copied() -> None:
    """Encoding hands the data on; decoding gives a view of the buffer."""
    data = memoryview(bytearray(b"\0" * 8))
    assert encode(WireTensor("float32", (2,), data))[1] is data
    buffer = bytearray(raw() + b"\0" * 8)
    tensor, _ = decode(buffer)
    buffer[-8] = 7
    assert bytes(tensor.data) == b"\7" + b"\0" * 7


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "ends within a tensor's header"),
        (b"\x01\x0c", "ends within a tensor's header"),
        (raw()[:-1], "ends within a tensor's dimensions"),
        (raw() + b"1234567", "ends within a tensor's data"),
        (raw(kind=2) + b"12345678", "unknown tensor kind 2"),
        (raw(code=0) + b"12345678", "unknown tensor dtype code 0"),
        (raw(code=15) + b"12345678", "unknown tensor dtype code 15"),
        (raw(dims=(3,)) + b"12345678", r"8 bytes cannot be a float32 tensor of shape \(3,\)"),
        (raw(length=9) + b"123456789", "9 bytes cannot be"),
        (raw(dims=(0,), length=0), "no dimension may be empty"),
        (raw(dims=(2, 0), length=0), "no dimension may be empty"),
        (raw(dims=(1,) * 9, length=4) + b"1234", "9 dimensions"),
        (raw(dims=(1 << 63, 1 << 63), length=0), "cannot be"),
        (raw(dims=(1 << 32, 1 << 30, 1), length=(1 << 64) - 4), "cannot be"),
        (raw(dims=(1 << 60,), length=1 << 62), "are allowed"),
        (raw(code=1, dims=(2,), length=2) + b"\1\2", "bool"),
    ],
)
def test_malformed_tensors_are_refused(data: bytes, what: str) -> None:
    """Each field is checked against the others and against what is there."""
    with pytest.raises(WireError, match=what):
        decode(data)


@pytest.mark.parametrize("offset", [-1, 20, 1 << 70])
def test_an_offset_outside_is_refused(offset: int) -> None:
    """There is no tensor before or behind the buffer."""
    with pytest.raises(WireError, match="ends within"):
        decode(b"\1" * 19, offset)


def test_the_cap_is_the_readers() -> None:
    """A tensor of exactly the cap passes; one byte of cap less refuses it."""
    buffer = raw() + b"12345678"
    assert decode(buffer, max_bytes=8)[1] == len(buffer)
    with pytest.raises(WireError, match="8 bytes; 7 are allowed"):
        decode(buffer, max_bytes=7)


@pytest.mark.parametrize(
    "tensor",
    [
        WireTensor("float31", (2,), b"12345678"),
        WireTensor("float32", (3,), b"12345678"),
        WireTensor("float32", (-2,), b""),
        WireTensor("float32", (0,), b""),
        WireTensor("uint8", (1,) * 9, b"1"),
        WireTensor("float32", (2,), memoryview(np.zeros(3, np.float32))),
    ],
)
def test_inconsistent_tensors_are_not_sent(tensor: WireTensor) -> None:
    """A sender never emits what its reader would refuse."""
    with pytest.raises(WireError):
        header(tensor)


@given(tensors(), st.data())
def test_mutated_tensors_raise_nothing_else(tensor: WireTensor, data: st.DataObject) -> None:
    """Whatever the bytes, decoding gives a tensor within the buffer or a WireError."""
    buffer = bytearray(b"".join(encode(tensor)))
    for _ in range(data.draw(st.integers(1, 4))):
        buffer[data.draw(st.integers(0, min(len(buffer), 40) - 1))] = data.draw(st.integers(0, 255))
    del buffer[data.draw(st.integers(len(buffer) // 2, len(buffer))) :]
    try:
        read, end = decode(buffer)
    except WireError:
        return
    assert end <= len(buffer)
    assert len(read.data) == math.prod(read.shape) * DTYPES[read.dtype].itemsize


@given(st.binary(max_size=100), st.integers(-5, 105))
def test_random_bytes_raise_nothing_else(buffer: bytes, offset: int) -> None:
    """Noise is no tensor, and never another error."""
    with suppress(WireError):
        decode(buffer, offset)


def test_a_claimed_size_allocates_nothing() -> None:
    """A header that claims a gigabyte costs no memory before its bytes are there."""
    claim = raw(dims=(1 << 28,), length=1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="ends within a tensor's data"):
            decode(claim)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
