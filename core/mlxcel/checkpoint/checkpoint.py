"""A checkpoint on disk: its settings and what tensors it holds, with nothing loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from mlxcel.checkpoint.config import ModelConfig, read_config
from mlxcel.checkpoint.headers import TensorHeader
from mlxcel.checkpoint.index import weight_files
from mlxcel.checkpoint.quantization import QuantizationMap, read_quantization


@attrs.frozen
class Checkpoint:
    """One model on disk.

    Attributes:
        path: Its folder.
        config: What its ``config.json`` says.
        tensors: Every tensor of its weight files by name.
        files: The weight files, sorted by name; none where ``tensors`` were worked out from
            ``config.json`` alone, so that there is nothing to load.
        notices: One line each that a user should read.
        quantization: How modules are packed; None for plain weights.
        loaded: The tensors that the model uses, as they are in memory. Only a family knows;
            until one has opened the checkpoint, they are all and as in the files.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, TensorHeader]
    files: tuple[Path, ...]
    notices: tuple[str, ...] = ()
    quantization: QuantizationMap | None = None
    loaded: Mapping[str, TensorHeader] = attrs.field(
        default=attrs.Factory(lambda self: self.tensors, takes_self=True), repr=False
    )


def open_checkpoint(path: Path) -> Checkpoint:
    """Read settings and headers of the checkpoint at ``path``, a folder or its ``config.json``.

    Raises:
        CheckpointError: Anything about it is missing, malformed or contradictory.
    """
    config = read_config(path)
    folder = config.path.parent
    weights = weight_files(folder)
    return Checkpoint(
        path=folder,
        config=config,
        tensors=weights.tensors,
        files=weights.files,
        notices=weights.notices,
        quantization=read_quantization(config),
    )
