"""Whether config.json and the weight files belong together, as far as headers can tell.

What only the model's own class knows (names and shapes of every tensor) is checked at load;
this comes first, before anything is loaded or any worker started.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mlxcel.checkpoint.config import CONFIG_FILE, ModelConfig
from mlxcel.errors import CheckpointError
from mlxcel.errors.words import counted, named_layers
from mlxcel.family.contract import Family, Part
from mlxcel.partition.ranges import format_layers

if TYPE_CHECKING:
    from mlxcel.checkpoint.checkpoint import Checkpoint

_LEFT_OVER = frozenset(
    "absmax quant_map SCB g_idx weight_packed weight_scale weight_scale_2 weight_scale_inv "
    "weight_global_scale weight_zero_point".split()
)
"""What other tools call the parts of a packed matrix, as far as no loader makes MLX's of them."""

_GROUP_INDICES = ".g_idx"
_REPACKED = ("awq", "gptq")
_LOADED_FOR_ALL = frozenset({"mxfp4", "mxfp8", *_REPACKED})
"""The methods whose tensors mlx-lm's loader makes MLX's of, whatever the model."""

_PACKED_TYPES = frozenset({"U8", "I8", "I16", "I32", "F8_E4M3", "F8_E5M2", "F4"})
_LAYER = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")


def check_consistency(checkpoint: Checkpoint, family: Family) -> None:
    """Refuse a checkpoint whose parts contradict each other.

    Raises:
        CheckpointError: The output projection is missing, tensors are packed and
            config.json does not say how, or they are packed by a tool that is not read.
    """
    _check_foreign(checkpoint, family)
    _check_head(checkpoint, family)
    _check_packed(checkpoint)


def oddities(checkpoint: Checkpoint, family: Family) -> tuple[str, ...]:
    """One line each for what a user should know although the checkpoint works."""
    config = checkpoint.config
    notices = []
    layers = {int(match[1]) for name in checkpoint.tensors if (match := _LAYER.match(name))}
    beyond = sorted(layer for layer in layers if layer >= config.num_layers)
    draft_layers = config.get("num_nextn_predict_layers", 0)  # these stand behind the last one
    if not isinstance(draft_layers, int) or len(beyond) > draft_layers:
        notices.append(
            f"{checkpoint.path}: the weights of {named_layers(format_layers(beyond))} are ignored: "
            f"{CONFIG_FILE} describes {counted(config.num_layers, 'layer')}"
        )
    if checkpoint.quantization is not None:
        modules = {name.rpartition(".")[0] for name in checkpoint.tensors}
        if unused := checkpoint.quantization.unused(modules):
            notices.append(
                f"{config.path}: quantization settings that fit no tensor are ignored: "
                f"{', '.join(unused)}"
            )
    if ignored := family.ignored(config):
        notices.append(
            f"{config.path}: mlx-lm's model of type {config.model_type!r} does not read "
            f"{' and '.join(ignored)}; what it computes may differ from the original"
        )
    return tuple(notices)


def _check_foreign(checkpoint: Checkpoint, family: Family) -> None:
    """What another tool packed is read where the model's class unpacks it.

    Some conversions still name the tool after they have unpacked everything; they do no harm.
    Without files nobody can tell, and the tool's name counts.
    """
    quantization, config = checkpoint.quantization, checkpoint.config
    method = None if quantization is None else quantization.method
    if method in family.unpacks(config):
        return
    if not checkpoint.files:
        if method is not None and method not in _LOADED_FOR_ALL:
            raise _foreign(config, f"by {method!r}")
        return
    unknown = quantization is not None and quantization.mode is None
    packed = next(
        (
            header
            for name, header in checkpoint.loaded.items()
            if name.rpartition(".")[2] in _LEFT_OVER or (unknown and header.dtype in _PACKED_TYPES)
        ),
        None,
    )
    if packed is None:
        return
    which = f"{packed.name} in {packed.file.name}"
    if method in _REPACKED and packed.name.endswith(_GROUP_INDICES):
        raise CheckpointError(
            checkpoint.path,
            f"its {method} tensors have group indices ({which}), which are not read.",
            "Quantize the original weights with mlx_lm.convert, or get them without indices.",
        )
    how = f"by {method!r}" if method else "in a form that it does not name"
    raise _foreign(config, f"{how} ({which})")


def _foreign(config: ModelConfig, how: str) -> CheckpointError:
    return CheckpointError(
        config.path,
        f"the weights are packed {how}, which is not read for a model of type "
        f"{config.model_type!r}.",
        "Quantize the original weights with mlx_lm.convert, or get them unpacked.",
    )


def _check_head(checkpoint: Checkpoint, family: Family) -> None:
    """The head is the only matrix behind the last layer; a norm has one dimension."""
    config = checkpoint.config
    if family.tied(config) or any(
        len(header.shape) >= 2 and family.place(name, config).part is Part.HEAD
        for name, header in checkpoint.loaded.items()
    ):
        return
    raise CheckpointError(
        checkpoint.path,
        f"{CONFIG_FILE} says that the output projection is a matrix of its own "
        f"(tie_word_embeddings is false), but the weight files hold none.",
        f"Fetch the missing weight file; if the model is tied, set tie_word_embeddings to true "
        f"in {CONFIG_FILE}.",
    )


def _check_packed(checkpoint: Checkpoint) -> None:
    """Only config.json says in what groups and with how many bits a matrix was packed."""
    if checkpoint.quantization is not None:
        return
    packed = [
        name
        for name in checkpoint.loaded
        if name.endswith(".scales") and f"{name.removesuffix('scales')}weight" in checkpoint.loaded
    ]
    if packed:
        matrices = counted(len(packed), "quantized matrix", "quantized matrices")
        raise CheckpointError(
            checkpoint.config.path,
            f"has no quantization settings, but the weight files hold {matrices} ({packed[0]}).",
            f"Use the {CONFIG_FILE} that belongs to the weights.",
        )
