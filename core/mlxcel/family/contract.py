"""What a model family tells mlxcel, without MLX.

A family plugin is one object, an instance of a :class:`Family` subclass, in a light
module. Everything here is asked while planning (no MLX, no mlx_lm); the one heavy
question, :meth:`Family.stage_class`, imports what it needs when it is asked.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import attrs

from mlxcel.checkpoint.checkpoint import Checkpoint, open_checkpoint
from mlxcel.checkpoint.config import ModelConfig
from mlxcel.checkpoint.headers import TensorHeader
from mlxcel.errors import UnsupportedError
from mlxcel.family.batching import Batching
from mlxcel.family.caches import CacheKind
from mlxcel.family.shapes import TensorShape
from mlxcel.tensor.options import TensorParallel
from mlxcel.tensor.plan import ShardPlan, plan_of

if TYPE_CHECKING:
    from mlxcel.family.transformer import TransformerStage

VISION_SUFFIX = "_vlm"
"""A wire name with this suffix serves the text tower of a checkpoint that has a vision_config."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.(?:experts|switch_mlp|switch_glu)\.")
_EXPERTS_OF_A_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NEVER_READ = frozenset(  # other towers, and draft layers for multi-token prediction
    {
        "vision_tower",
        "vision_model",
        "vision_embedder",
        "visual",
        "audio_tower",
        "multi_modal_projector",
        "embed_vision",
        "embed_audio",
        "mtp",
    }
)


@attrs.frozen
class LayerAdjacencyGroup:
    """Layers ``start`` to ``end`` (half-open) that must share a stage, and why.

    ``mirrorable``: a cut within works too, if the last layer's stage is sent what the first one
    puts into its cache, and keeps a mirror of it.
    """

    start: int
    end: int
    reason: str
    mirrorable: bool = False

    def cut_by(self, boundary: int) -> bool:
        """Whether a stage that begins at layer ``boundary`` would divide this group."""
        return self.start < boundary < self.end


class Part(enum.Enum):
    """The part of a model that a checkpoint tensor belongs to."""

    TABLE = "table"  # the token embedding: first stage, and the last one when tied
    EMBEDDING = "embedding"  # whatever else makes the first hidden state: first stage
    LAYER = "layer"
    HEAD = "head"  # final norm and output projection: last stage
    UNUSED = "unused"  # never read: other towers, buffers, layers that do not exist


@attrs.frozen
class Place:
    """Where one checkpoint tensor goes; ``layer`` is set for :attr:`Part.LAYER` only."""

    part: Part
    layer: int | None = None


def never_read(name: str) -> bool:
    """Whether the tensor ``name`` is none of a text model's: a buffer, or of another tower."""
    return "rotary_emb" in name or not _NEVER_READ.isdisjoint(name.split("."))


class Family:
    """One model family. Subclass it, set the class attributes, name an instance as entry point.

    Attributes:
        api_version: The plugin API this plugin was written for, ``"major.minor"``. It has no
            default: a plugin states it itself.
        wire_names: The names peers see at the handshake; each is an entry point.
        model_types: Further ``model_type`` values of config.json that this family serves.
        runnable: False while the family can be planned but not run.
        fallback: True for a family that is asked last, for every ``model_type`` that no other
            one serves. What it serves goes by ``wire name:model_type``.
        tied_by_default: What ``tie_word_embeddings`` means when config.json does not say.
    """

    api_version: ClassVar[str]
    wire_names: ClassVar[tuple[str, ...]] = ()
    model_types: ClassVar[tuple[str, ...]] = ()
    runnable: ClassVar[bool] = True
    fallback: ClassVar[bool] = False
    tied_by_default: ClassVar[bool] = False

    def stage_class(self) -> type[TransformerStage]:
        """The class that runs a range of this family's layers. Imports MLX.

        By default the shared base: full attention in every layer, and only hidden states cross.
        """
        from mlxcel.family.transformer import TransformerStage

        return TransformerStage

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint at ``path`` as this family reads it; only headers are read.

        Its config is settled, and ``loaded`` holds what is not :attr:`Part.UNUSED`.

        Raises:
            CheckpointError: Anything about it is missing, malformed or contradictory.
        """
        checkpoint = open_checkpoint(path)
        config = self.settle(checkpoint.config, checkpoint.tensors.keys())
        used = {
            name: header
            for name, header in checkpoint.tensors.items()
            if self.place(name, config).part is not Part.UNUSED
        }
        return attrs.evolve(checkpoint, config=config, loaded=self.loaded(used))

    def settle(self, config: ModelConfig, tensors: Collection[str]) -> ModelConfig:
        """``config`` corrected by what the checkpoint's ``tensors`` (their names) say."""
        return config

    def loaded(self, tensors: Mapping[str, TensorHeader]) -> Mapping[str, TensorHeader]:
        """The headers of ``tensors`` as they are in memory, before ``--dtype``.

        They differ from the files' where ``sanitize`` changes how many bytes there are or of
        which type: a block-scaled float8 matrix and its scales become one of bfloat16.
        """
        return tensors

    def unpacks(self, config: ModelConfig) -> tuple[str, ...]:
        """The ``quant_method`` of each tool whose tensors ``sanitize`` unpacks; none by default.

        What :meth:`loaded` then says of those tensors is not looked at. MLX's own form needs no
        mention, nor does what mlx-lm's loader turns into it (AWQ, GPTQ). Where config.json names
        none of these tools, or none at all, a checkpoint is refused if tensors in :meth:`loaded`
        still have a name that tools give to parts of a packed matrix, as ``weight_scale``.
        """
        return ()

    def shapes(self, config: ModelConfig) -> Iterator[TensorShape]:
        """Every parameter of the whole model, as mlx-lm's own model of ``config`` has them.

        With it a model can be planned from config.json alone.

        Raises:
            CheckpointError: A field is missing, or the fields contradict each other.
        """
        raise UnsupportedError(
            f"The family {self.wire_names[0]!r} cannot be planned from config.json alone.",
            "Plan it from a folder that holds the weights.",
        )

    def shard_plan(self, config: ModelConfig, options: TensorParallel) -> ShardPlan:
        """How the model is split over tensor-parallel ranks, by what :meth:`shapes` says.

        Raises:
            CheckpointError: As :meth:`shapes` does.
            UnsupportedError: The family does not say what its parameters are.
        """
        return plan_of(self.shapes(config), options)

    def caches(self, config: ModelConfig) -> tuple[CacheKind | None, ...]:
        """What each layer keeps of a sequence; None for a layer that keeps nothing.

        Raises:
            CheckpointError: A field is missing, or the fields contradict each other.
        """
        raise UnsupportedError(
            f"The family {self.wire_names[0]!r} does not say what its layers keep of a sequence.",
            "Plan it without --context and --sequences.",
        )

    def batching(self, config: ModelConfig) -> Batching:
        """Which sequences may share a pass; by default all."""
        return Batching.PADDED

    def adjacency(self, config: ModelConfig) -> tuple[LayerAdjacencyGroup, ...]:
        """The groups of layers that must share a stage; none by default."""
        return ()

    def ignored(self, config: ModelConfig) -> tuple[str, ...]:
        """The fields of config.json that would matter and that mlx-lm's model does not read.

        None by default. They are told to the user.
        """
        return ()

    def tied(self, config: ModelConfig) -> bool:
        """Whether the output projection is the token embedding."""
        return bool(config.get("tie_word_embeddings", self.tied_by_default))

    def place(self, name: str, config: ModelConfig) -> Place:
        """The part of the model that the checkpoint tensor ``name`` belongs to.

        The name is the checkpoint's, in hub naming or mlx-lm's converted naming.
        """
        if never_read(name):
            return Place(Part.UNUSED)
        if match := _LAYER.search(name):
            layer = int(match[1])
            return Place(Part.LAYER, layer) if layer < config.num_layers else Place(Part.UNUSED)
        if "embed_tokens." in name:
            return Place(Part.TABLE)
        if "lm_head." in name:
            return Place(Part.UNUSED if self.tied(config) else Part.HEAD)
        if name.endswith("norm.weight"):
            return Place(Part.HEAD)
        return Place(Part.UNUSED)

    def touched(self, name: str, config: ModelConfig) -> float:
        """The share of the tensor ``name`` that one token multiplies with: 1, or top-k of n."""
        if not _EXPERT.search(name):
            return 1.0
        active = config.first(*_EXPERTS_OF_A_TOKEN)
        total = config.first(*_EXPERTS)
        return active / total if active and total else 1.0

    def casts(self, name: str) -> bool:
        """Whether ``--dtype`` applies to the floating tensor ``name``; true by default."""
        return True
