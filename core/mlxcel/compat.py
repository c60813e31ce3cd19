"""Everything mlxcel takes from mlx-lm that may move between its versions.

Importing this module imports mlx_lm, and with it transformers (1.5 s): only code that
builds and runs models does so.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args, get_type_hints

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx_lm import tokenizer_utils, tool_parsers, utils
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import make_prompt_cache

from mlxcel.checkpoint.json_file import read_json_object
from mlxcel.checkpoint.quantization import AFFINE_BITS, AFFINE_GROUPS
from mlxcel.checkpoint.rope import with_single_rope_fields

__all__ = [
    "ToolParser",
    "create_attention_mask",
    "create_ssm_mask",
    "empty_model",
    "find_tool_parser",
    "infer_quantization",
    "make_prompt_cache",
    "unpack_awq",
]


def empty_model(config: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's own model for ``config``, its parameters never evaluated.

    Args:
        config: The content of config.json; it is not changed.

    Raises:
        ValueError: mlx-lm has no such ``model_type``, or its class cannot be told what
            ``rope_parameters`` says.
        TypeError, KeyError, …: whatever the model's class makes of a field it cannot use.
    """
    own = copy.deepcopy(dict(config))
    model_class, args_class = utils._get_classes(own)
    if isinstance(text := own.get("text_config"), dict):
        own["text_config"] = with_single_rope_fields(text, _text_fields(args_class, text))
    own = with_single_rope_fields(own, _fields(args_class))
    return cast(nn.Module, model_class(args_class.from_dict(own)))


def _fields(args_class: type) -> Collection[str] | None:
    """What ``args_class`` takes; None where it hands a whole config on to another class."""
    fields = inspect.signature(args_class).parameters
    return None if "text_config" in fields else fields


def _text_fields(args_class: type, text: Mapping[str, Any]) -> Collection[str] | None:
    """What the class takes that ``args_class`` hands its ``text_config`` to; None if unknown."""
    hint = get_type_hints(args_class).get("text_config")
    options = [option for option in get_args(hint) if isinstance(option, type)]
    if named := [option for option in options if is_dataclass(option)]:
        return _fields(named[0])
    try:
        return _fields(utils._get_classes(dict(text))[1])
    except (KeyError, ValueError):  # it has no model_type, or one that only vision models have
        return None


def infer_quantization(
    path: str, module: nn.Module, weights: Mapping[str, mx.array]
) -> dict[str, Any]:
    """How the packed tensor of ``path`` was quantized, read off its shapes.

    Returns:
        ``group_size``, ``bits`` and ``mode``, and ``global_scale`` where one is stored.

    Raises:
        ValueError: The shapes fit no mode that MLX knows.
    """
    if f"{path}.weight" not in weights:
        raise ValueError("it has scales and no weight")
    found = dict(utils.infer_quant_config(path, module, dict(weights)))
    bits, group_size = found["bits"], found["group_size"]
    # mlx-lm only divides; what fits no kernel would raise later, without a name.
    affine = found["mode"] == "affine"
    if affine and (bits not in AFFINE_BITS or group_size not in AFFINE_GROUPS):
        raise ValueError(f"{bits} bits in groups of {group_size}")
    if f"{path}.global_scale" in weights:
        found["global_scale"] = True
    return found


def unpack_awq(weights: dict[str, mx.array], settings: Mapping[str, Any]) -> dict[str, mx.array]:
    """AutoAWQ and GPTQ tensors repacked as MLX packs them."""
    repacked, _ = utils._transform_awq_weights(weights, dict(settings))
    return repacked


@attrs.frozen
class ToolParser:
    """mlx-lm's reader of the tool calls of one format.

    Attributes:
        name: The format's name in mlx-lm.
        start, end: What stands before and after a call; no ``end``: it goes on to the text's.
        parse: From what stands between, and the tools, to a call ``{"name", "arguments"}`` or
            a list of such; whatever it raises says that there is none.
    """

    name: str
    start: str
    end: str
    parse: Callable[[str, Any], Any]


def find_tool_parser(path: Path, template: str, vocab: Mapping[str, int]) -> ToolParser | None:
    """The reader that mlx-lm itself would take for the checkpoint in ``path``.

    tokenizer_config.json may name it, then the model's class; else the chat template and the
    vocabulary tell.

    Returns:
        None if nothing tells, or what is named does not exist.

    Raises:
        CheckpointError: tokenizer_config.json cannot be read.
    """
    settings = path / "tokenizer_config.json"
    named = read_json_object(settings).get("tool_parser_type") if settings.exists() else None
    if named is None:
        named = (utils._tokenizer_defaults(path) or {}).get("tool_parser_type")
    if named is None:
        named = tokenizer_utils._infer_tool_parser(
            SimpleNamespace(chat_template=template, get_vocab=lambda: vocab)
        )
    if named not in {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}:
        return None
    module = importlib.import_module(f"{tool_parsers.__name__}.{named}")
    return ToolParser(
        str(named), module.tool_call_start, module.tool_call_end, module.parse_tool_call
    )
