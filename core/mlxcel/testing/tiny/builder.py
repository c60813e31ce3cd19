"""Building a tiny checkpoint: draw the weights, rename them as on the hub, write the files."""

from __future__ import annotations

import contextlib
import fnmatch
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxcel.testing.checkpoint_writer import TensorSpec, write_checkpoint
from mlxcel.testing.tiny import (
    deepseek_v3,
    ernie4_5,
    gemma3,
    gemma4,
    glm4,
    gpt_oss,
    hunyuan_v1_dense,
    jamba,
    kimi_k3,
    llama,
    llama4,
    mixtral,
    nemotron_h,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_next,
)
from mlxcel.testing.tiny.recipe import Recipe, Weights, draw
from mlxcel.testing.tiny.tokenizer import write_tokenizer

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for family in (
        deepseek_v3,
        ernie4_5,
        gemma3,
        gemma4,
        glm4,
        gpt_oss,
        hunyuan_v1_dense,
        jamba,
        kimi_k3,
        llama,
        llama4,
        mixtral,
        nemotron_h,
        qwen2,
        qwen3,
        qwen3_5,
        qwen3_next,
    )
    for recipe in family.RECIPES
}

_SAFETENSORS_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "uint8": "U8",
}


def names() -> tuple[str, ...]:
    """What :func:`build` can make."""
    return tuple(RECIPES)


ONLY_FILES = frozenset(
    {
        "deepseek_v3_mtp",
        "deepseek_v3_mtp_counted",
        "gemma3_text",
        "jamba_dense",
        "llama4_vlm",
        "llama_sliding",
        "llama_tied_head",
        "llama_untied_headless",
    }
)
"""Checkpoints that differ from another one in what is stored, or leave out a part of it."""


def models() -> tuple[str, ...]:
    """The names of checkpoints whose models differ, sorted."""
    return tuple(sorted(set(names()) - ONLY_FILES))


def build(
    name: str,
    out: Path,
    *,
    dtype: str = "float32",
    quantize: str | None = None,
    overrides: Mapping[str, str] | None = None,
    shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    """Write the tiny checkpoint ``name`` into the folder ``out``, the same bytes every time.

    Args:
        name: One of :func:`names`.
        out: The checkpoint's folder, made if need be.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; what the family keeps in
            float32 stays so.
        quantize: ``"bits:group"`` or ``"bits:group:mode"`` for the layout of mlx-lm's
            conversion, e.g. ``"4:32"`` or ``"4:32:mxfp4"``; None for the hub's own layout.
        overrides: Patterns of module paths (``"*.layers.0.*"``) with a ``quantize`` of their
            own, or ``"none"``; the first that fits counts.
        shards: The number of ``safetensors`` files.
        tokenizer: Write the tokenizer too.

    Returns:
        ``out``.

    Raises:
        ValueError: An unknown name, or an argument of the wrong form.
    """
    recipe = _recipe(name)
    model = draw_model(name, dtype=dtype)
    config = {**recipe.config, "torch_dtype": dtype}
    if quantize is None:
        if overrides:
            raise ValueError("overrides need quantize")
        write_weights(out, recipe.to_hub(_parameters(model), config), config, shards, "pt")
    else:
        config |= recipe.model_config
        quantized = quantize_in_place(model, config, quantize, overrides or {})
        write_weights(out, _parameters(model), None, shards, "mlx")
        from mlx_lm.utils import save_config

        save_config(quantized, out / "config.json")
    if tokenizer:
        write_tokenizer(out)
    return out


def draw_model(name: str, *, dtype: str = "float32") -> nn.Module:
    """mlx-lm's own model with the parameters that :func:`build` writes (unquantized)."""
    import mlx.core as mx
    from mlx.utils import tree_unflatten

    from mlxcel.compat import empty_model

    if dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}, not float32, float16 or bfloat16")
    recipe = _recipe(name)
    model = empty_model({**recipe.config, **recipe.model_config})
    bits = recipe.bits()
    casts = getattr(model, "cast_predicate", lambda path: True)
    drawn = []
    for path, parameter in sorted(_parameters(model).items()):
        value = mx.array(draw(bits, path, parameter.shape, tied=recipe.tied))
        drawn.append((path, value.astype(getattr(mx, dtype)) if casts(path) else value))
    model.update(tree_unflatten(drawn))
    if recipe.headless:
        text: Any = getattr(model, "language_model", model)
        text.sanitize({})  # mlx-lm gives up the head here, where there is none to load
    model.eval()
    mx.eval(model.parameters())
    return model


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"there is no tiny checkpoint {name!r}, only {', '.join(RECIPES)}")
    return RECIPES[name]


def _parameters(model: nn.Module) -> Weights:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(model.parameters()))


def _quantization(spec: str) -> dict[str, Any]:
    bits, group, *mode = spec.split(":")
    return {"group_size": int(group), "bits": int(bits), "mode": mode[0] if mode else "affine"}


def quantize_in_place(
    model: nn.Module, config: Mapping[str, Any], spec: str, overrides: Mapping[str, str]
) -> dict[str, Any]:
    """Quantize ``model`` in place; returns the config that says how."""
    from mlx_lm.utils import quantize_model

    default = _quantization(spec)
    own: Callable[[str, Any], bool | dict[str, Any]] = getattr(model, "quant_predicate", None) or (
        lambda path, module: True
    )

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        for pattern, override in overrides.items():
            if fnmatch.fnmatchcase(path, pattern):
                return False if override == "none" else _quantization(override)
        return own(path, module)

    with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits per weight
        _, quantized = quantize_model(
            model,
            dict(config),
            default["group_size"],
            default["bits"],
            default["mode"],
            quant_predicate=predicate,
        )
    return dict(quantized)


def write_weights(
    out: Path, weights: Weights, config: Mapping[str, Any] | None, shards: int, format: str
) -> None:
    """Write ``weights`` into ``shards`` files of the folder ``out``, as ``write_checkpoint``."""
    specs = {
        name: TensorSpec(_SAFETENSORS_DTYPES[_dtype_name(array)], tuple(array.shape))
        for name, array in sorted(weights.items())
    }
    write_checkpoint(
        out,
        specs,
        lambda name: _bytes_of(weights[name]),
        config=config,
        shards=shards,
        format=format,
    )


def _dtype_name(array: mx.array) -> str:
    return str(array.dtype).rsplit(".", 1)[-1]


def _bytes_of(array: mx.array) -> bytes:
    import mlx.core as mx

    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes()
