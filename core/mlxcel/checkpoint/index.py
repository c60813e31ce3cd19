"""Find a checkpoint's weight files and the tensors in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from mlxcel.checkpoint.headers import TensorHeader, read_header
from mlxcel.checkpoint.json_file import read_json_object
from mlxcel.errors import CheckpointError
from mlxcel.errors.words import counted

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_AGAIN = "The download is probably incomplete: run it again."


@attrs.frozen
class WeightFiles:
    """The safetensors files that make up a checkpoint.

    Attributes:
        tensors: Every tensor by name.
        files: The files they are in, sorted by name.
        notices: One line each about what was found and not used.
    """

    tensors: Mapping[str, TensorHeader]
    files: tuple[Path, ...]
    notices: tuple[str, ...] = ()


def weight_files(path: Path) -> WeightFiles:
    """Find the weights in folder ``path`` and read their headers.

    The index decides if there is one; without it a single ``model.safetensors`` or one complete
    set ``model-00001-of-0000N.safetensors``. An index that names only files that are not there,
    beside weights that are complete without it, is stale and left aside with a notice.

    Raises:
        CheckpointError: No weights, missing shards, a malformed index or file, or one tensor
            in two files.
    """
    present = {file.name for file in path.glob("*.safetensors") if file.is_file()}
    notices: list[str] = []
    placed: Mapping[str, str] = {}
    index = path / INDEX_FILE
    if index.is_file():
        placed = _weight_map(index)
        missing = sorted(set(placed.values()) - present)
        if len(missing) == len(set(placed.values())) and _complete(present):
            notices.append(f"{index}: ignored, it is stale: none of the files it names is here")
            placed = {}
        elif missing:
            raise CheckpointError(path, f"lacks {', '.join(missing)}.", _AGAIN)
    names = set(placed.values()) or _without_index(path, present)
    if unused := sorted(present - names):
        notices.append(f"{path}: not part of the model, ignored: {', '.join(unused)}")
    files = tuple(path / name for name in sorted(names))
    tensors = _merge(read_header(file) for file in files)
    for name, shard in placed.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                path / shard,
                f"lacks the tensor {name!r} that {INDEX_FILE} places there.",
                "Index and weights do not belong together: get both from one source.",
            )
    if unlisted := len(tensors) - len(placed) if placed else 0:
        tensors_of_its_files = f"{counted(unlisted, 'tensor')} of its files"
        notices.append(f"{index}: does not list {tensors_of_its_files}, used anyway")
    return WeightFiles(tensors, files, tuple(notices))


def _weight_map(index: Path) -> dict[str, str]:
    placed = read_json_object(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(index, "has no weight_map.", _AGAIN)
    for shard in placed.values():
        if (
            not isinstance(shard, str)
            or "/" in shard
            or "\\" in shard
            or not shard.endswith(".safetensors")
        ):
            raise CheckpointError(
                index,
                f"names {shard!r}, which is no safetensors file of this folder.",
                "Use an index whose weight_map holds plain file names.",
            )
    return placed


def _complete(present: set[str]) -> set[str]:
    """The files that make up a model by their names alone; empty if there is no such set."""
    if SINGLE_FILE in present:
        return {SINGLE_FILE}
    shards = [match for name in present if (match := _SHARD.fullmatch(name))]
    numbers = sorted(int(match[1]) for match in shards)
    totals = {int(match[2]) for match in shards}
    if len(totals) == 1 and numbers == list(range(1, len(shards) + 1)) and len(shards) in totals:
        return {match.string for match in shards}
    return set()


def _without_index(path: Path, present: set[str]) -> set[str]:
    if names := _complete(present):
        return names
    if shards := sorted(name for name in present if _SHARD.fullmatch(name)):
        raise CheckpointError(
            path, f"holds {', '.join(shards)}, which is not one complete set of shards.", _AGAIN
        )
    if any(path.glob("*.gguf")):
        way_out = "Convert the GGUF file: `mlxcel import-gguf FILE DIR`."
    else:
        way_out = f"Use a checkpoint in safetensors format ({SINGLE_FILE} or shards of it)."
    raise CheckpointError(path, "holds no model weights in safetensors format.", way_out)


def _merge(headers: Iterable[Mapping[str, TensorHeader]]) -> dict[str, TensorHeader]:
    tensors: dict[str, TensorHeader] = {}
    for header in headers:
        for name, tensor in header.items():
            if name in tensors:
                raise CheckpointError(
                    tensor.file,
                    f"holds the tensor {name!r}, and so does {tensors[name].file.name}.",
                    "Keep only the files of one checkpoint in the folder.",
                )
            tensors[name] = tensor
    return tensors
