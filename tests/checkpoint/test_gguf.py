import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.checkpoint.gguf import GgufTensor, read_gguf
from mlxcel.errors import CheckpointError

METADATA = {"a": "text", "b": 3, "c": 0.5, "d": True, "e": ["x", "yé"], "f": [1, -2]}


def test_reads_metadata_and_tensors(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """Metadata becomes Python values, shapes are row-major, and no tensor is loaded."""
    tensors = {"w": (np.ones((2, 64)), "Q4_1"), "n": (np.ones(3), "F32")}
    found = read_gguf(write_gguf(tmp_path / "m.gguf", METADATA, tensors))
    assert found.metadata == METADATA
    assert found.tensors == {
        "w": GgufTensor("w", "Q4_1", (2, 64)),
        "n": GgufTensor("n", "F32", (3,)),
    }


def test_reads_what_mlx_writes(tmp_path: Path) -> None:
    """Files that MLX writes are read with the same names, types and shapes."""
    mx = pytest.importorskip("mlx.core")
    arrays = {"a.weight": mx.zeros((4, 3), mx.float16), "b": mx.zeros((5,))}
    file = tmp_path / "m.gguf"
    mx.save_gguf(str(file), arrays, {"s": "hi", "l": ["p", "q"], "n": mx.array(3, mx.uint32)})
    found = read_gguf(file)
    assert found.metadata == {"s": "hi", "l": ["p", "q"], "n": 3}
    assert {(t.name, t.type, t.shape) for t in found.tensors.values()} == {
        ("a.weight", "F16", (4, 3)),
        ("b", "F32", (5,)),
    }


def test_unknown_tensor_types_keep_a_name(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """A type that nothing here reads still has a name to refuse it by."""
    file = write_gguf(tmp_path / "m.gguf", {}, {"w": (np.ones((1, 256)), "Q6_K")})
    assert read_gguf(file).tensors["w"].type == "Q6_K"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "no GGUF file"),
        (b"PK\x03\x04", "no GGUF file"),
        (b"GGUF", "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version is 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "ends inside"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "ends inside"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**62), "ends inside"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "unknown type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"w", 99), "99 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1s", 3, 0, 1, 1, b"\xff"), "not UTF-8"),
    ],
)
def test_malformed_files(tmp_path: Path, content: bytes, what: str) -> None:
    """Counts and lengths are checked against the file before anything is allocated for them."""
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=what):
        read_gguf(file)


def test_cut_short(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """A file whose last tensor is not all there says how many bytes it lacks."""
    file = write_gguf(tmp_path / "m.gguf", METADATA, {"n": (np.ones(8), "F32")})
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="short by 5 bytes"):
        read_gguf(file)


def test_missing_file(tmp_path: Path) -> None:
    """A file that is not there is a CheckpointError."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_gguf(tmp_path / "m.gguf")


@given(st.data())
def test_mutated_files(data: st.DataObject) -> None:
    """A file with bytes changed or cut off is read or refused with a CheckpointError."""
    pairs = [b"k", struct.pack("<IQ", 8, 2), b"hi", struct.pack("<Q", 1), b"l"]
    head = [b"GGUF", struct.pack("<IQQQ", 3, 1, 2, 1), *pairs, struct.pack("<IIQii", 9, 5, 2, 1, 2)]
    info = [struct.pack("<Q", 1), b"w", struct.pack("<IQQIQ", 2, 3, 2, 0, 0)]
    content = bytearray(b"".join([*head, *info]) + bytes(64))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "m.gguf")
        file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        try:
            found = read_gguf(file)
        except CheckpointError:
            return
        assert len(found.tensors) <= 1
