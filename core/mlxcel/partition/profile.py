"""What each part of a model costs: bytes to hold it, multiplications to run one token.

Bytes are exact: they come from the safetensors headers, after the casts of ``--dtype``.
Work counts the weights that one token is multiplied with, which is what decides the time
of a step on a CPU; a token touches one row of the embedding, but the whole head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from mlxcel.checkpoint.dtype import stored_bytes
from mlxcel.errors import CheckpointError
from mlxcel.family.contract import Family, LayerAdjacencyGroup, Part
from mlxcel.partition.ranges import format_ranges

if TYPE_CHECKING:
    from mlxcel.checkpoint.checkpoint import Checkpoint
    from mlxcel.checkpoint.dtype import DtypeChoice
    from mlxcel.checkpoint.headers import TensorHeader


@attrs.frozen
class LayerProfile:
    """One layer: ``bytes`` in memory, ``work`` in multiply-adds per token."""

    bytes: int
    work: int


@attrs.frozen
class ModelProfile:
    """Everything a partitioner must know about a model.

    Attributes:
        layers: One entry per layer, in order.
        embedding_bytes, embedding_work: What the first stage has besides its layers.
        head_bytes, head_work: What the last stage has besides its layers.
        groups: The layers that must share a stage.
        shared_bytes: The bytes counted for the embedding *and* for the head, because the two
            are tied; one stage that holds both ends holds them once.
    """

    layers: tuple[LayerProfile, ...]
    embedding_bytes: int = 0
    embedding_work: int = 0
    head_bytes: int = 0
    head_work: int = 0
    groups: tuple[LayerAdjacencyGroup, ...] = ()
    shared_bytes: int = 0


def profile_checkpoint(checkpoint: Checkpoint, family: Family, dtype: DtypeChoice) -> ModelProfile:
    """Profile ``checkpoint`` as ``family`` places its tensors; only headers are read.

    Raises:
        CheckpointError: The checkpoint lacks layers that its config.json promises.
    """
    config = checkpoint.config
    tied = family.tied(config)
    layer_bytes = [0] * config.num_layers
    layer_work = [0] * config.num_layers
    found: set[int] = set()
    embedding_bytes = embedding_work = head_bytes = head_work = shared_bytes = 0

    for name, header in checkpoint.loaded.items():
        place = family.place(name, config)
        if place.part is Part.UNUSED:
            continue
        size = stored_bytes(header, dtype, family.casts(name))
        weights = _weights(header, checkpoint)
        work = round(weights * family.touched(name, config))
        if place.part is Part.LAYER:
            assert place.layer is not None
            found.add(place.layer)
            layer_bytes[place.layer] += size
            layer_work[place.layer] += work
        elif place.part is Part.HEAD:
            head_bytes += size
            head_work += work
        else:
            embedding_bytes += size
            embedding_work += work // _rows(header) if _is_table(name, place.part) else work
            if tied and place.part is Part.TABLE:
                shared_bytes += size
                head_bytes += size
                head_work += work

    if missing := sorted(set(range(config.num_layers)) - found):
        raise CheckpointError(
            checkpoint.path,
            f"config.json promises {config.num_layers} layers, but there are no tensors of "
            f"layers {_numbers(missing)}.",
            "Fetch the missing weight files, or correct num_hidden_layers.",
        )
    return ModelProfile(
        layers=tuple(map(LayerProfile, layer_bytes, layer_work)),
        embedding_bytes=embedding_bytes,
        embedding_work=embedding_work,
        head_bytes=head_bytes,
        head_work=head_work,
        groups=family.adjacency(config),
        shared_bytes=shared_bytes,
    )


def _weights(header: TensorHeader, checkpoint: Checkpoint) -> int:
    """How many weights a tensor stands for; a quantized matrix is counted at its ``.weight``."""
    module, _, leaf = header.name.rpartition(".")
    tensors: Mapping[str, TensorHeader] = checkpoint.loaded
    scales = tensors.get(f"{module}.scales")
    if scales is None or f"{module}.weight" not in tensors:
        return math.prod(header.shape)
    if leaf != "weight":
        return 0 if leaf in ("scales", "biases") else math.prod(header.shape)
    quantization = checkpoint.quantization and checkpoint.quantization.for_path(module)
    if not quantization:
        # config.json does not say; the loader will read it off the model. Most are 4 bits.
        return header.nbytes * 2
    return math.prod(scales.shape) * quantization.group_size


def _rows(header: TensorHeader) -> int:
    return header.shape[0] if header.shape and header.shape[0] else 1


def _is_table(name: str, part: Part) -> bool:
    """Whether a token looks up one row of this tensor instead of multiplying with it."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    return part is Part.TABLE or module.startswith("embed_tokens")


def _numbers(layers: list[int]) -> str:
    """``[0, 1, 2, 7]`` as ``0-2,7``."""
    runs: list[range] = []
    for layer in layers:
        if runs and runs[-1].stop == layer:
            runs[-1] = range(runs[-1].start, layer + 1)
        else:
            runs.append(range(layer, layer + 1))
    return format_ranges(runs)
