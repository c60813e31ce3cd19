import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.checkpoint.headers import DTYPE_BITS, TensorHeader, read_header
from mlxcel.errors import CheckpointError


def packed(header: Any, data: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def entry(dtype: Any = "F32", shape: Any = (2, 3), span: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


VALID = packed(
    {"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("BF16", (), (24, 26))}, 26
)


def test_reads_names_types_and_shapes(tmp_path: Path) -> None:
    """A header gives name, dtype, shape and place of each tensor; metadata is no tensor."""
    file = tmp_path / "m.safetensors"
    file.write_bytes(VALID)
    data = len(VALID) - 26
    assert read_header(file) == {
        "a": TensorHeader("a", "F32", (2, 3), 24, file, data),
        "b": TensorHeader("b", "BF16", (), 2, file, data + 24),
    }


def test_reads_what_mlx_writes(tmp_path: Path) -> None:
    """Files that MLX writes are read with the same shapes and bytes."""
    mx = pytest.importorskip("mlx.core")
    arrays = {"w": mx.zeros((3, 5), mx.bfloat16), "n": mx.zeros((4,), mx.uint8), "s": mx.array(1.0)}
    file = tmp_path / "m.safetensors"
    mx.save_safetensors(str(file), arrays)
    found = read_header(file)
    assert {n: (t.dtype, t.shape, t.nbytes) for n, t in found.items()} == {
        "w": ("BF16", (3, 5), 30),
        "n": ("U8", (4,), 4),
        "s": ("F32", (), 4),
    }


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_its_size(tmp_path: Path, dtype: str) -> None:
    """Each dtype's bytes follow from its bits, also where two elements share a byte."""
    nbytes = 6 * DTYPE_BITS[dtype] // 8
    file = tmp_path / "m.safetensors"
    file.write_bytes(packed({"a": entry(dtype, (2, 3), (0, nbytes))}, nbytes))
    assert read_header(file)["a"].nbytes == nbytes


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "twice"),
        ({"a": 3}, "no object"),
        ({"a": entry("F17")}, "unknown dtype"),
        ({"a": entry([])}, "unknown dtype"),
        ({"a": entry(shape=[2, -3])}, "no valid shape"),
        ({"a": entry(shape=[2, True])}, "no valid shape"),
        ({"a": entry(shape="23")}, "no valid shape"),
        ({"a": entry(shape=[1] * 17)}, "no valid shape"),
        ({"a": entry(span=[24, 0])}, "data_offsets"),
        ({"a": entry(span=[0])}, "data_offsets"),
        ({"a": entry(span=None)}, "data_offsets"),
        ({"a": entry(shape=[2, 4])}, "holds 24 bytes"),
        ({"a": entry("F4", [3], [0, 1])}, "holds 1 bytes"),
        ({"a": entry(), "b": entry(span=[20, 44])}, "overlap"),
    ],
)
def test_malformed_headers(tmp_path: Path, header: Any, what: str) -> None:
    """Each way a header can contradict the format has its own words."""
    file = tmp_path / "m.safetensors"
    file.write_bytes(packed(header, 64))
    with pytest.raises(CheckpointError, match=what):
        read_header(file)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "by at least 8 bytes"),
        (VALID[:20], r"by at least \d+ bytes"),
        (VALID[:-7], "short by 7 bytes"),
        ((200_000_000).to_bytes(8, "little") + b"{}", "header of 200000000 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_cut_short(tmp_path: Path, content: bytes, what: str) -> None:
    """A file that ends early says how many bytes it lacks, and nothing is allocated for them."""
    file = tmp_path / "m.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=what):
        read_header(file)


def test_missing_file(tmp_path: Path) -> None:
    """A file that is not there is an error of the checkpoint, not of the operating system."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "m.safetensors")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS]) | json_values,
        "shape": st.lists(st.integers(-1, 5), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-1, 64), min_size=2, max_size=2) | json_values,
    }
)


def survives(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "m.safetensors")
        file.write_bytes(content)
        try:
            tensors = read_header(file)
        except CheckpointError:
            return
        assert sum(tensor.nbytes for tensor in tensors.values()) <= len(content)


@given(st.binary(max_size=200) | st.binary(max_size=60).map(packed))
def test_any_bytes(content: bytes) -> None:
    """Random bytes are read or refused with a CheckpointError, never anything else."""
    survives(content)


@given(st.dictionaries(st.text(max_size=8), entries | json_values, max_size=4), st.integers(0, 99))
def test_any_json(header: dict[str, Any], data: int) -> None:
    """Random JSON in the header is read or refused, and never claims more than the file holds."""
    survives(packed(header, data))


@given(st.integers(0, len(VALID) - 1), st.integers(0, 255), st.integers(0, len(VALID)))
def test_mutated_file(at: int, byte: int, end: int) -> None:
    """A valid file with one byte changed, or cut anywhere, is read or refused."""
    survives(VALID[:at] + bytes([byte]) + VALID[at + 1 :])
    survives(VALID[:end])
