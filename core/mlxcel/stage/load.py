"""Load one stage: build the model, read only what is the stage's own.

``mx.load`` is lazy, and so is building a model: until :func:`evaluate` touches a
parameter, neither costs memory. So ``sanitize`` can run over the map of the *whole*
model, which makes expert stacking, splits and renames the same on every stage, and
still a stage never reads another stage's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxcel import compat
from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.headers import TensorHeader
from mlxcel.errors import CheckpointError
from mlxcel.errors.words import counted, named_layers
from mlxcel.family.contract import Family, Part
from mlxcel.family.transformer import TransformerStage, flat_parameters
from mlxcel.partition.ranges import format_ranges
from mlxcel.stage.contract import Progress
from mlxcel.stage.fill import Shares, fill
from mlxcel.stage.joined import join, narrow
from mlxcel.stage.packed import Packed, take_packed
from mlxcel.stage.together import Joint
from mlxcel.tensor.collectives import Collectives
from mlxcel.tensor.options import ALONE, TensorParallel

# How Python names the first field that a config left out.
_MISSING_FIELD = re.compile(
    r"(?:Args|Config)\.__init__\(\) missing \d+ required positional arguments?: '(\w+)'"
)

Weights = dict[str, mx.array]
Tensors = dict[str, mx.array | Packed]


def load_stage(
    checkpoint: Checkpoint,
    family: Family,
    start: int,
    stop: int,
    cast: str | None,
    progress: Progress = lambda done, total: None,
    dequantize: bool = False,
    *,
    tensor: TensorParallel = ALONE,
    ranks: range = range(1),
    collectives: Collectives | None = None,
) -> TransformerStage:
    """Layers ``start`` to ``stop`` of ``checkpoint``, evaluated and ready to run.

    Args:
        cast: The dtype that floating parameters are cast to; None keeps what is stored.
        progress: Told the bytes evaluated so far and the bytes in all.
        dequantize: Make every quantized module of the stage a plain one with float32 weights.
        tensor: How many ranks share the stage, and what of it they share out.
        ranks: Those that this worker is: all of them, or one.
        collectives: Reach the others.

    Raises:
        CheckpointError: config.json does not describe a model, or tensors are missing,
            unknown or of the wrong shape.
    """
    stage_class = family.stage_class()
    models = [_build(stage_class, checkpoint) for _ in ranks]
    read = _read(checkpoint, family)
    plain = _repack(read, checkpoint)
    for model in models:  # it may change the model too (Gemma 3 gives up a head it ties)
        weights = _sanitize(stage_class, model, dict(plain), checkpoint)
    stored = _stored(weights, read, checkpoint)
    del read, plain
    packing = _packing(models[0], weights, checkpoint)
    tensors: Tensors = {**weights}
    if dequantize:
        tensors = _take_packed(weights, packing, checkpoint)
    else:
        for model in models:
            nn.quantize(model, class_predicate=lambda path, module: packing.get(path, False))
    stages = [stage_class(model, start, stop) for model in models]
    own, names = _own(stages[0], tensors, checkpoint, family)
    del weights, tensors
    plan = family.shard_plan(checkpoint.config, tensor) if tensor.size > 1 else None
    assert plan is None or plan.divides(tensor.size), "refused when it was planned"
    dtype = None if cast is None else getattr(mx, cast)
    shares = Shares(names, plan, ranks, tensor.size, dtype, family, stored)
    for stage in stages:
        stage.model.eval()
        if plan is not None:
            narrow(stage, plan, names, tensor.size)
    fill(stages, own, shares, progress)
    return stages[0] if plan is None else join(stages, plan, names, Joint(ranks, collectives))


def _build(stage_class: type[TransformerStage], checkpoint: Checkpoint) -> nn.Module:
    config = checkpoint.config
    try:
        return stage_class.build_model(config)
    except Exception as error:
        if missing := _MISSING_FIELD.search(str(error)):
            config.require(missing[1])
        raise CheckpointError(
            config.path,
            f"no {config.model_type!r} model can be built from it "
            f"({type(error).__name__}: {error}).",
            "Check the fields against the original model's config.json.",
        ) from error


def _read(checkpoint: Checkpoint, family: Family) -> Weights:
    """The tensors that the model uses, none of them evaluated."""
    used = {
        name: header
        for name, header in checkpoint.tensors.items()
        if family.place(name, checkpoint.config).part is not Part.UNUSED
    }
    weights: Weights = {}
    for file in sorted({header.file for header in used.values()}):
        for name, value in _open(file).items():
            if name in used and used[name].file == file:
                weights[name] = value
    return weights


def _repack(weights: Weights, checkpoint: Checkpoint) -> Weights:
    """``weights`` as MLX packs them, whoever packed them.

    Raises:
        CheckpointError: They are not what their tool writes, or not what mlx-lm repacks.
    """
    settings = checkpoint.quantization
    if settings is not None and settings.method in ("awq", "gptq"):
        packing = {"bits": settings.bits, "group_size": settings.group_size}
        try:
            return compat.unpack_awq(weights, packing)
        except Exception as error:
            raise CheckpointError(
                checkpoint.path,
                f"its {settings.method} tensors cannot be repacked for MLX "
                f"({type(error).__name__}: {error}).",
                "Quantize the original weights with mlx_lm.convert.",
            ) from error
    return weights


def _open(file: Path) -> Weights:
    try:
        return cast(Weights, mx.load(str(file)))
    except RuntimeError as error:
        raise CheckpointError(
            file,
            f"MLX cannot read it ({error}).",
            "Get the weights in another type, or convert the original ones with mlx_lm.convert.",
        ) from error


def _stored(weights: Weights, read: Weights, checkpoint: Checkpoint) -> dict[str, TensorHeader]:
    """Those of ``weights`` that are arrays of ``read``, under whatever name: as in their files."""
    names = {id(value): name for name, value in read.items()}
    return {
        name: checkpoint.tensors[names[id(value)]]
        for name, value in weights.items()
        if id(value) in names
    }


def _sanitize(
    stage_class: type[TransformerStage],
    model: nn.Module,
    weights: Weights,
    checkpoint: Checkpoint,
) -> Weights:
    try:
        return stage_class.sanitize(model, weights)
    except Exception as error:
        raise CheckpointError(
            checkpoint.path,
            f"its tensors are not those of a {checkpoint.config.model_type!r} model "
            f"({type(error).__name__}: {error}).",
            "Check that config.json and the weight files belong together.",
        ) from error


def _packing(
    model: nn.Module, weights: Weights, checkpoint: Checkpoint
) -> dict[str, dict[str, Any]]:
    """How the weight of each module that is packed was quantized, by its own shapes."""
    if checkpoint.quantization is None:
        return {}
    modules = cast(
        list[tuple[str, nn.Module]],
        tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module),
    )
    packing = {}
    for path, module in modules:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            continue
        try:
            packing[path] = compat.infer_quantization(path, module, weights)
        except ValueError as error:
            raise CheckpointError(
                checkpoint.path,
                f"{path} is packed in a way MLX does not know ({error}).",
                "Convert the model again with mlx_lm.convert.",
            ) from error
    return packing


def _take_packed(
    weights: Weights, packing: Mapping[str, Mapping[str, Any]], checkpoint: Checkpoint
) -> Tensors:
    try:
        return take_packed(weights, packing)
    except KeyError as missing:
        raise CheckpointError(
            checkpoint.path, f"{missing.args[0]} is missing.", "Download the model again."
        ) from missing


def _own(
    stage: TransformerStage, weights: Tensors, checkpoint: Checkpoint, family: Family
) -> tuple[Tensors, dict[str, str]]:
    """This stage's share of ``weights`` under its local names, checked for completeness.

    Also what each of them is called in the whole model.
    """
    stray = [
        name
        for name in weights
        if name not in stage.expected and family.place(name, checkpoint.config).part != Part.UNUSED
    ]
    if stray:
        raise CheckpointError(
            checkpoint.path,
            f"{_some(stray)} {'is' if len(stray) == 1 else 'are'} not part of a "
            f"{checkpoint.config.model_type!r} model as config.json describes it.",
            "Check that config.json and the weight files belong together.",
        )
    wanted = flat_parameters(stage.model)
    own: Tensors = {}
    names: dict[str, str] = {}
    for name, value in weights.items():
        local = stage.local_name(name)
        if local is not None and local in wanted:
            own[local], names[local] = value, name
    if missing := [name for name in wanted if name not in own]:
        own_layers = range(stage.start, stage.stop)
        raise CheckpointError(
            checkpoint.path,
            f"the stage of {named_layers(format_ranges([own_layers]))} lacks {_some(missing)}.",
            "Download the model again, or check that config.json belongs to these weights.",
        )
    for name, value in own.items():
        if value.shape != wanted[name].shape:
            raise CheckpointError(
                checkpoint.path,
                f"{name} has shape {tuple(value.shape)}, config.json asks for "
                f"{tuple(wanted[name].shape)}.",
                "Check that config.json and the weight files belong together.",
            )
    return own, names


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:4])
    return shown if len(names) <= 4 else f"{shown} and {counted(len(names) - 4, 'more tensor')}"
