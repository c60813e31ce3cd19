"""Checkpoints of real sizes without their weights: headers, and a hole where the data would be.

The tensors are those of mlx-lm's own model, packed by mlx-lm's own quantizer; nothing is
evaluated. So what a plan says of such a folder can be held against what it says of the
config.json alone.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxcel.testing.checkpoint_writer import TensorSpec, write_checkpoint

if TYPE_CHECKING:
    import mlx.nn as nn

_PACKED = {"uint32": "U32", "uint8": "U8"}


def write_headers(
    out: Path, config: Mapping[str, Any], *, quantize: str | None = None, dtype: str = "BF16"
) -> Path:
    """The headers of mlx-lm's converted checkpoint of ``config``, and its config.json.

    Args:
        out: The folder, made if need be.
        quantize: ``"bits:group:mode"``; None for plain weights.
        dtype: The safetensors type of floating parameters that mlx-lm casts; the others are
            float32.

    Returns:
        ``out``.
    """
    model, settings = skeleton(config, quantize)
    casts = getattr(model, "cast_predicate", lambda path: True)
    specs: dict[str, TensorSpec] = {}
    for name, (kind, shape) in _parameters(model).items():
        specs[name] = TensorSpec(_PACKED.get(kind, dtype if casts(name) else "F32"), shape)
    return write_checkpoint(out, specs, None, config=settings, format="mlx")


def skeleton(
    config: Mapping[str, Any], quantize: str | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model of ``config``, packed as ``quantize`` says, and the config of that."""
    from mlx_lm.utils import quantize_model

    from mlxcel.compat import empty_model

    settings = copy.deepcopy(dict(config))
    model = empty_model(settings)
    if settings["model_type"].startswith("gemma3"):  # mlx-lm gives its head up at loading
        text: Any = getattr(model, "language_model", model)
        text.pop("lm_head")
        text.tie_word_embeddings = True
    if quantize is not None:
        bits, group, mode = quantize.split(":")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits per weight
            _, settings = quantize_model(model, settings, int(group), int(bits), mode)
    return model, settings


def _parameters(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    from mlxcel.family.transformer import flat_parameters

    return {
        name: (str(value.dtype).rpartition(".")[2], tuple(value.shape))
        for name, value in sorted(flat_parameters(model).items())
    }
