"""What each part of a model costs: bytes to hold it, multiplications to run one token.

Bytes come from the safetensors headers, after the casts of ``--dtype`` and what ``--weights``
makes of packed matrices; so they are exact, unless the headers were worked out from
config.json alone.
Work counts the weights that one token is multiplied with, which is what decides the time
of a step on a CPU; a token touches one row of the embedding, but the whole head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from mlxcel.checkpoint.dtype import DtypeChoice, stored_bytes
from mlxcel.errors import CheckpointError
from mlxcel.errors.words import counted, named_layers
from mlxcel.family.contract import Family, LayerAdjacencyGroup, Part
from mlxcel.partition.ranges import format_layers

if TYPE_CHECKING:
    from mlxcel.checkpoint.checkpoint import Checkpoint
    from mlxcel.checkpoint.headers import TensorHeader

_FLOAT32_BYTES = 4


@attrs.frozen
class LayerProfile:
    """One layer: ``bytes`` of its weights in memory, ``work`` in multiply-adds per token.

    ``kv_bytes`` are its caches, for as many tokens as the plan is made for.
    """

    bytes: int
    work: int
    kv_bytes: int = 0


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
        mirrors: Groups that may be divided: whoever then holds the last layer of one without the
            first holds a mirror of the first one's cache.
    """

    layers: tuple[LayerProfile, ...]
    embedding_bytes: int = 0
    embedding_work: int = 0
    head_bytes: int = 0
    head_work: int = 0
    groups: tuple[LayerAdjacencyGroup, ...] = ()
    shared_bytes: int = 0
    mirrors: tuple[LayerAdjacencyGroup, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The bytes of all stages together, if there are at least two."""
        layers = sum(layer.bytes for layer in self.layers)
        return layers + self.embedding_bytes + self.head_bytes

    def with_caches(self, kv_bytes: Sequence[int]) -> ModelProfile:
        """The same profile with the bytes of each layer's caches."""
        layers = zip(self.layers, kv_bytes, strict=True)
        return attrs.evolve(
            self, layers=tuple(attrs.evolve(layer, kv_bytes=size) for layer, size in layers)
        )

    def with_mirrors(self) -> ModelProfile:
        """The same profile, where mirrors may take the place of adjacency."""
        return attrs.evolve(
            self,
            groups=tuple(group for group in self.groups if not group.mirrorable),
            mirrors=tuple(group for group in self.groups if group.mirrorable),
        )

    def mirrored(self, layers: range) -> tuple[int, ...]:
        """The layers before ``layers`` whose caches a stage of these mirrors, ascending."""
        groups = (group for group in self.mirrors if group.start < layers.start)
        return tuple(sorted({group.start for group in groups if group.end - 1 in layers}))


def profile_checkpoint(
    checkpoint: Checkpoint, family: Family, dtype: DtypeChoice, *, dequantize: bool = False
) -> ModelProfile:
    """Profile ``checkpoint`` as ``family`` places its tensors; only headers are read.

    Args:
        dtype: What ``--dtype`` came to.
        dequantize: Whether packed matrices become plain float32 ones.

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
        packed = _packed_weights(header, checkpoint)
        if dequantize and packed is not None:
            size = packed * _FLOAT32_BYTES
        else:
            size = stored_bytes(header, dtype, family.casts(name))
        weights = math.prod(header.shape) if packed is None else packed
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
            f"config.json promises {counted(config.num_layers, 'layer')}, but there are no tensors "
            f"of {named_layers(format_layers(missing))}.",
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


def plain_bytes(checkpoint: Checkpoint, family: Family) -> int:
    """What the stages hold in all with dequantized weights, and so everything in float32."""
    float32 = DtypeChoice("float32", "")
    return profile_checkpoint(checkpoint, family, float32, dequantize=True).total_bytes


def _packed_weights(header: TensorHeader, checkpoint: Checkpoint) -> int | None:
    """How many weights are packed in this part of a quantized matrix; None if it is not one.

    All count at the matrix's ``.weight``, none at its scales and biases.
    """
    module, _, leaf = header.name.rpartition(".")
    tensors: Mapping[str, TensorHeader] = checkpoint.loaded
    if f"{module}.qweight" in tensors:  # AutoAWQ and GPTQ: 4 bits, eight in an integer
        parts = {"qweight": 8 * math.prod(header.shape), "qzeros": 0, "scales": 0}
        return parts.get(leaf)
    scales = tensors.get(f"{module}.scales")
    if scales is None or f"{module}.weight" not in tensors:
        return None
    if leaf != "weight":
        return 0 if leaf in ("scales", "biases", "global_scale") else None
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
