"""Which quantization each module of a checkpoint has, from its configuration.

MLX's own form is ``{"group_size", "bits", "mode", "<module path>": {...} | true | false}``.
Formats of other tools that mlx-lm's loader turns into MLX's are read as what they become.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from mlxcel.checkpoint.config import ModelConfig
from mlxcel.checkpoint.json_file import read_json_object
from mlxcel.errors import CheckpointError

MODELOPT_FILE = "hf_quant_config.json"

AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
"""What MLX has kernels for in the mode ``affine``."""

QUANTIZE_ACTIVATIONS = "quantize_activations"

_RENAMED_SEGMENTS = frozenset({"model", "language_model"})


@attrs.frozen
class Quantization:
    """How one module's weight is packed: ``bits`` per element, one scale per ``group_size``."""

    group_size: int
    bits: int
    mode: str = "affine"


_MODE_DEFAULTS = {
    "affine": Quantization(64, 4, "affine"),
    "mxfp4": Quantization(32, 4, "mxfp4"),
    "mxfp8": Quantization(32, 8, "mxfp8"),
    "nvfp4": Quantization(16, 4, "nvfp4"),
}
_COMPRESSED_TENSORS = {
    "nvfp4-pack-quantized": _MODE_DEFAULTS["nvfp4"],
    "mxfp4-pack-quantized": _MODE_DEFAULTS["mxfp4"],
    "pack-quantized": Quantization(32, 4, "affine"),
}


def canonical(path: str) -> str:
    """A module path without the segments that differ between namings of one model."""
    return ".".join(s for s in path.split(".") if s not in _RENAMED_SEGMENTS)


@attrs.frozen
class QuantizationMap:
    """The quantization of every module of a checkpoint.

    Attributes:
        group_size, bits, mode: What a module has that no override names. All None where the
            weights are not packed in a way that MLX multiplies with (``method`` says which).
        overrides: By module path as the configuration writes it; None means not quantized.
        method: The ``quant_method`` of a format that is not MLX's own, or None.
    """

    group_size: int | None
    bits: int | None
    mode: str | None
    overrides: Mapping[str, Quantization | None] = MappingProxyType({})
    method: str | None = None

    def for_path(self, path: str) -> Quantization | None:
        """The quantization of the module at ``path``; None if it has none.

        Overrides match under renamed prefixes. Whether a module without override is quantized
        at all, its ``.scales`` tensor says.
        """
        default = None
        if self.group_size is not None and self.bits is not None and self.mode is not None:
            default = Quantization(self.group_size, self.bits, self.mode)
        return self._by_module.get(canonical(path), default)

    def unused(self, paths: Iterable[str]) -> tuple[str, ...]:
        """The override keys that name none of the module paths ``paths``."""
        known = {canonical(path) for path in paths}
        return tuple(key for key in self.overrides if canonical(key) not in known)

    @cached_property
    def _by_module(self) -> dict[str, Quantization | None]:
        return {canonical(key): override for key, override in self.overrides.items()}


def read_quantization(config: ModelConfig) -> QuantizationMap | None:
    """The quantization that ``config`` describes, or None for plain weights.

    Raises:
        CheckpointError: It is malformed, names a mode or a format that nothing here reads, or
            asks for quantized activations.
    """
    settings, file = _settings(config)
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise _wrong(file, f"quantization is {settings!r}, not an object")
    if any(source.get(QUANTIZE_ACTIVATIONS) for source in (config.raw, config.text, settings)):
        raise CheckpointError(
            file,
            f"asks for quantized activations ({QUANTIZE_ACTIVATIONS} is true), "
            "which no stage computes.",
            f"Set {QUANTIZE_ACTIVATIONS} to false: quantized weights with plain activations are "
            "the more precise form of the same model.",
        )
    method = settings.get("quant_method")
    if method is None:
        return _mlx_form(settings, file)
    if not isinstance(method, str):
        raise _wrong(file, f"quant_method is {method!r}, not a name")
    known = _foreign_form(method, settings, file)
    if known is None:
        return QuantizationMap(None, None, None, method=method)
    return QuantizationMap(known.group_size, known.bits, known.mode, method=method)


def _settings(config: ModelConfig) -> tuple[Any, Path]:
    """The quantization settings and the file they stand in."""
    for key in ("quantization", "quantization_config"):
        for settings in (config.raw, config.text):
            if (found := settings.get(key)) is not None:
                return found, config.path
    file = config.path.with_name(MODELOPT_FILE)
    if file.is_file():
        return {"quant_method": "modelopt", **read_json_object(file)}, file
    return None, config.path


def _mlx_form(settings: Mapping[str, Any], file: Path) -> QuantizationMap:
    default = _quantization(settings, "quantization", file)
    overrides: dict[str, Quantization | None] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            overrides[key] = _quantization(value, f"the quantization of {key}", file)
        elif isinstance(value, bool) and key != QUANTIZE_ACTIVATIONS:
            overrides[key] = default if value else None
    by_module: dict[str, str] = {}
    for key, override in overrides.items():
        other = by_module.setdefault(canonical(key), key)
        if overrides[other] != override:
            raise _wrong(file, f"quantization overrides {other!r} and {key!r} disagree")
    return QuantizationMap(default.group_size, default.bits, default.mode, overrides)


def _foreign_form(method: str, settings: Mapping[str, Any], file: Path) -> Quantization | None:
    """What the weights of another tool become in MLX; None if they stay a matter of the loader."""
    match method:
        case "mxfp4" | "mxfp8":
            return _MODE_DEFAULTS[method]
        case "fp8" if settings.get("scale_fmt") == "ue8m0" and settings.get(
            "weight_block_size"
        ) == [32, 32]:
            return _MODE_DEFAULTS["mxfp8"]
        case "compressed-tensors":
            packing = settings.get("format")
            if not isinstance(packing, str) or packing not in _COMPRESSED_TENSORS:
                raise _wrong(file, f"the compressed-tensors format {packing!r} cannot be read")
            return _COMPRESSED_TENSORS[packing]
        case "modelopt":
            nested = settings.get("quantization")
            own = nested if isinstance(nested, dict) else settings
            if own.get("quant_algo") != "NVFP4":
                raise _wrong(file, f"the modelopt format {own.get('quant_algo')!r} cannot be read")
            return _quantization({**own, "bits": 4, "mode": "nvfp4"}, "modelopt", file)
        case "awq" | "gptq":
            if settings.get("bits", 4) != 4:
                raise _wrong(file, f"{method} is read with 4 bits only, not {settings['bits']!r}")
            size = settings.get("group_size", 128)
            return _quantization({"group_size": size, "bits": 4}, method, file)
    return None


def _quantization(settings: Mapping[str, Any], what: str, file: Path) -> Quantization:
    """``settings`` with MLX's defaults of their mode for what they leave out."""
    mode = settings.get("mode", "affine")
    if not isinstance(mode, str) or mode not in _MODE_DEFAULTS:
        known = ", ".join(_MODE_DEFAULTS)
        raise _wrong(file, f"{what} has the unknown mode {mode!r} (known: {known})")
    default = _MODE_DEFAULTS[mode]
    found = Quantization(
        settings.get("group_size", default.group_size), settings.get("bits", default.bits), mode
    )
    if mode == "affine":
        possible = found.bits in AFFINE_BITS and found.group_size in AFFINE_GROUPS
    else:
        possible = found == default
    if not possible or type(found.bits) is not int or type(found.group_size) is not int:
        raise _wrong(
            file,
            f"{what} has {found.bits!r} bits in groups of {found.group_size!r}, "
            f"which MLX has no {mode} kernel for",
        )
    return found


def _wrong(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        file, f"{problem}.", "Quantize the original weights again with mlx_lm.convert."
    )
