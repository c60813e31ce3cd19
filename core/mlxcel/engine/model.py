"""A model to be run: a checkpoint on this machine's disk, with its family, types and plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import attrs

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.config import read_config
from mlxcel.checkpoint.dtype import DtypeChoice, activation_bytes, choose_dtype
from mlxcel.checkpoint.rope import rope_scaling_of
from mlxcel.checkpoint.weights_mode import WeightsChoice, choose_weights
from mlxcel.engine.tokenizer import Tokenizer, load_tokenizer
from mlxcel.errors import CheckpointError, MemoryBudgetError, TensorParallelError, UnsupportedError
from mlxcel.family.batching import Batching
from mlxcel.family.caches import CacheKind, rank_kind, worker_kind
from mlxcel.family.choose import choose_family
from mlxcel.family.contract import Family
from mlxcel.partition.balance import BalanceBy
from mlxcel.partition.cache_bytes import Workload
from mlxcel.partition.consistency import oddities
from mlxcel.partition.memory import MemoryLimits
from mlxcel.partition.plan import Plan, make_plan
from mlxcel.partition.profile import plain_bytes
from mlxcel.partition.remedies import FLAGS, Wording
from mlxcel.plugins import Plugins
from mlxcel.stage.contract import StageSpec
from mlxcel.tensor.options import ALONE, TensorParallel

CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_context_length",
    "max_seq_len",
    "model_max_length",
    "seq_length",
)
"""What config.json calls the longest sequence: the usual name, and those of older models."""


@attrs.frozen
class Machine:
    """What the stages compute with; where they differ, the weakest of them.

    ``memory`` are the bytes that all stages have together, None if nobody knows.
    """

    device: Literal["cpu", "gpu"]
    fast_blas: bool
    memory: int | None


@attrs.frozen
class Model:
    """A checkpoint with its family, dtype and plan; nothing is loaded yet.

    ``tensor`` says how many ranks share each stage, ``apart`` whether each of them is a worker
    of its own.
    """

    checkpoint: Checkpoint
    family: str
    dtype: DtypeChoice
    weights: WeightsChoice
    plan: Plan
    tokenizer: Tokenizer
    plugins: Plugins
    tensor: TensorParallel = ALONE
    apart: bool = False

    @property
    def specs(self) -> tuple[StageSpec, ...]:
        """What each stage is asked to be."""
        stages = self.plan.stages
        return tuple(
            StageSpec(
                self.checkpoint.path,
                self.family,
                stage.stage_index,
                len(stages),
                stage.layer_range.start,
                stage.layer_range.stop,
                self.dtype.cast,
                self.weights.dequantize,
                self.tensor,
            )
            for stage in stages
        )

    @property
    def worker_specs(self) -> tuple[StageSpec, ...]:
        """What each worker is asked to be: the ranks of one stage follow each other."""
        if not self.apart:
            return self.specs
        ranks = range(self.tensor.size)
        return tuple(attrs.evolve(spec, rank=rank) for spec in self.specs for rank in ranks)

    @property
    def notices(self) -> tuple[str, ...]:
        """One line each for what the user should know before anything loads."""
        found = (*self.checkpoint.notices, *oddities(self.checkpoint, self._family))
        own = (self.dtype.notice, self.weights.notice, self._decode_path)
        return (*found, *(notice for notice in own if notice is not None))

    @property
    def cache_kinds(self) -> tuple[CacheKind | None, ...]:
        """What each layer keeps of a sequence."""
        return self._family.caches(self.checkpoint.config)

    @property
    def rank_cache_kinds(self) -> tuple[CacheKind | None, ...]:
        """What one rank keeps of a sequence, by layer."""
        return tuple(rank_kind(kind, self.tensor.size) for kind in self.cache_kinds)

    @property
    def worker_cache_kinds(self) -> tuple[CacheKind | None, ...]:
        """What one worker keeps of a sequence, by layer; it is one rank, or all of them."""
        size = self.tensor.size
        held = 1 if self.apart else size
        return tuple(worker_kind(kind, held, size) for kind in self.cache_kinds)

    @property
    def batching(self) -> Batching:
        """Which sequences may share a step."""
        return self._family.batching(self.checkpoint.config)

    @property
    def activation_bytes(self) -> int:
        """Bytes of one number of the activations and the caches."""
        return activation_bytes(self.checkpoint, self.dtype)

    @property
    def context_size(self) -> int | None:
        """Tokens of the longest sequence the model was made for, if config.json says.

        With YaRN, config.json may still name the length from before the scaling.
        """
        config = self.checkpoint.config
        size = config.first(*CONTEXT_KEYS)
        if not isinstance(size, int) or size <= 0:
            return None
        scaling = rope_scaling_of(config.text) or {}
        if "yarn" not in str(scaling.get("type") or scaling.get("rope_type")):
            return size
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
        if not isinstance(factor, (int, float)) or not isinstance(original, int):
            return size
        return max(size, int(factor * original))

    @property
    def _decode_path(self) -> str | None:
        """How the ranks of a stage make tokens, if there are any."""
        if self.tensor.size == 1:
            return None
        rows = "single" if self.batching is Batching.SINGLE else "batched"
        if self.apart:
            return f"decode path: {rows} forward, a worker for each of {self.tensor.size} ranks"
        return f"decode path: native {rows} forward"

    @property
    def _family(self) -> Family:
        family = self.plugins.load("family", self.family)
        assert isinstance(family, Family)  # the loader has checked it
        return family

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse token ids that the model's embedding has no row for.

        Raises:
            CheckpointError: The tokenizer is not this model's.
        """
        rows = self.checkpoint.config.get("vocab_size")
        if isinstance(rows, int) and (highest := max(tokens, default=0)) >= rows:
            raise CheckpointError(
                self.checkpoint.path / "tokenizer.json",
                f"makes the token id {highest}, but the model knows {rows} tokens.",
                "Use the tokenizer that belongs to the weights.",
            )


def plan_model(
    path: Path,
    plugins: Plugins,
    machine: Machine,
    *,
    dtype: str = "auto",
    size: int | None = None,
    layers: str | None = None,
    by: BalanceBy = "bytes",
    weights: str = "auto",
    workload: Workload | None = None,
    limits: MemoryLimits | None = None,
    mirrors: bool = False,
    tensor: TensorParallel = ALONE,
    apart: bool = False,
    wording: Wording = FLAGS,
) -> Model:
    """Read headers, choose family, dtype and stages; refuse what cannot run.

    Weights that ``weights="auto"`` would unpack stay packed if they fit the limits only so.

    Args:
        dtype, size, layers, by, weights: As the flags of ``mlxcel generate``.
        workload, limits, mirrors, tensor, apart, wording: See
            :func:`mlxcel.partition.plan.make_plan`.

    Raises:
        CheckpointError: The folder does not hold a readable checkpoint and tokenizer.
        UnsupportedError: No installed family runs it, or not in this dtype.
        PartitionError: The stages asked for are impossible.
        TensorParallelError: So many ranks cannot share the model.
        MemoryBudgetError: The stages do not fit the limits.
    """
    name, family = choose_family(read_config(path), plugins)
    if not family.runnable:
        raise UnsupportedError(
            f"The family {name!r} can be planned but not run yet.",
            "Choose a model of a family that runs; `mlxcel plugins` lists what is installed.",
        )
    checkpoint = family.open(path)

    def planned(weights: str) -> tuple[DtypeChoice, WeightsChoice, Plan]:
        mode = choose_weights(
            checkpoint,
            weights,
            dtype=dtype,
            device=machine.device,
            fast_blas=machine.fast_blas,
            plain_bytes=plain_bytes(checkpoint, family),
            memory_bytes=machine.memory,
        )
        choice = choose_dtype(checkpoint, "float32" if mode.dequantize else dtype, machine.device)
        plan = make_plan(
            checkpoint,
            family,
            choice,
            plugins,
            dequantize=mode.dequantize,
            size=size,
            layers=layers,
            by=by,
            workload=workload,
            limits=limits,
            mirrors=mirrors,
            tensor=tensor,
            apart=apart,
            wording=wording,
        )
        return choice, mode, plan

    try:
        found = planned(weights)
    except MemoryBudgetError as too_large:
        if weights != "auto":
            raise
        try:
            found = planned("quantized")
        except TensorParallelError:  # so many ranks need the unpacked weights
            raise too_large from None
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    return Model(checkpoint, name, *found, tokenizer, plugins, tensor, apart and tensor.size > 1)
