import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.checkpoint.index import INDEX_FILE, weight_files
from mlxcel.errors import CheckpointError

A, B, C = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))


@pytest.fixture
def shards(tmp_path: Path, write_weights: Callable[..., Path]) -> Callable[..., Path]:
    """Writes one small tensor per file, named after it, and returns the folder."""

    def write(**files: str) -> Path:
        for tensor, file in files.items():
            write_weights(tmp_path / file, {tensor: ("F32", (2,))})
        return tmp_path

    return write


def index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_single_file(shards: Callable[..., Path]) -> None:
    """A lone model.safetensors needs no index."""
    folder = shards(a="model.safetensors")
    found = weight_files(folder)
    assert found.files == (folder / "model.safetensors",)
    assert found.tensors["a"].file == folder / "model.safetensors"
    assert found.notices == ()


def test_shards_without_index(shards: Callable[..., Path]) -> None:
    """One complete set of numbered shards needs no index."""
    folder = shards(c=C, a=A, b=B)
    found = weight_files(folder)
    assert found.files == (folder / A, folder / B, folder / C)
    assert set(found.tensors) == {"a", "b", "c"}


def test_index_decides(shards: Callable[..., Path]) -> None:
    """With an index exactly its files are read; a stray file beside them is only mentioned."""
    folder = shards(a=A, b="extra.safetensors")
    index(folder, {"a": A})
    found = weight_files(folder)
    assert found.files == (folder / A,)
    assert set(found.tensors) == {"a"}
    (notice,) = found.notices
    assert "extra.safetensors" in notice


def test_stray_quantized_file_beside_shards(shards: Callable[..., Path]) -> None:
    """A second model.safetensors beside indexed shards is not mixed in."""
    folder = shards(a=A, b=B, c="model.safetensors")
    index(folder, {"a": A, "b": B})
    assert set(weight_files(folder).tensors) == {"a", "b"}


def test_missing_shards_are_listed(shards: Callable[..., Path]) -> None:
    """A deleted shard is named, with the likely cause."""
    folder = shards(a=A)
    index(folder, {"a": A, "b": B, "c": C})
    with pytest.raises(CheckpointError, match=rf"lacks {B}, {C}.*incomplete"):
        weight_files(folder)


def test_missing_shard_without_index(shards: Callable[..., Path]) -> None:
    """Numbered shards that are not all there are refused even when no index says so."""
    with pytest.raises(CheckpointError, match="not one complete set"):
        weight_files(shards(a=A, c=C))


def test_stale_index_is_set_aside(shards: Callable[..., Path]) -> None:
    """An index none of whose files exist gives way to the weights that are there, and says so."""
    folder = shards(a="model.safetensors")
    index(folder, {"a": A, "b": B, "c": C})
    found = weight_files(folder)
    assert found.files == (folder / "model.safetensors",)
    (notice,) = found.notices
    assert "stale" in notice


def test_index_without_any_weights(tmp_path: Path) -> None:
    """An index whose files are all absent is an incomplete download when nothing else is there."""
    index(tmp_path, {"a": A})
    with pytest.raises(CheckpointError, match=f"lacks {A}"):
        weight_files(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_malformed_index(shards: Callable[..., Path], content: str) -> None:
    """An index that cannot be followed is an error about the index."""
    folder = shards(a="model.safetensors")
    (folder / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        weight_files(folder)


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "x.bin", 3],
)
def test_index_stays_in_its_folder(shards: Callable[..., Path], shard: Any) -> None:
    """An index may only name safetensors files of its own folder."""
    folder = shards(a="model.safetensors")
    index(folder, {"a": shard})
    with pytest.raises(CheckpointError, match="no safetensors file of this folder"):
        weight_files(folder)


def test_index_and_header_disagree(shards: Callable[..., Path]) -> None:
    """A tensor that the index places where it is not found is an error naming both."""
    folder = shards(a=A, b=B)
    index(folder, {"a": B, "b": B})
    with pytest.raises(CheckpointError, match=rf"{B}: lacks the tensor 'a'"):
        weight_files(folder)


def test_unlisted_tensors_are_used(shards: Callable[..., Path], write_weights: Any) -> None:
    """Tensors that the index forgot are read all the same, with a notice."""
    folder = shards(a=A)
    write_weights(folder / A, {"a": ("F32", (2,)), "b": ("F32", (2,))})
    index(folder, {"a": A})
    found = weight_files(folder)
    assert set(found.tensors) == {"a", "b"}
    assert "does not list 1 tensor of its files" in found.notices[0]


def test_one_tensor_in_two_files(shards: Callable[..., Path], write_weights: Any) -> None:
    """A tensor in two files is refused, naming both files."""
    folder = shards(a=A, b=B)
    write_weights(folder / C, {"a": ("F32", (2,))})
    with pytest.raises(CheckpointError, match=rf"{C}: holds the tensor 'a', and so does {A}"):
        weight_files(folder)


def test_no_weights(tmp_path: Path) -> None:
    """A folder without safetensors says what is needed, or how to convert the GGUF file there."""
    with pytest.raises(CheckpointError, match="safetensors format"):
        weight_files(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(CheckpointError, match="import-gguf"):
        weight_files(tmp_path)
