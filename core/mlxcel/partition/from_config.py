"""A checkpoint that is not there: what its headers would be, from its config.json alone.

The family lists the parameters (:meth:`mlxcel.family.Family.shapes`); their types follow from
the settings. Everything that plans takes the result like a checkpoint on disk, but its bytes
are estimates, and ``files`` is empty: there is nothing to load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.config import ModelConfig, read_config
from mlxcel.checkpoint.headers import DTYPE_BITS, TensorHeader
from mlxcel.checkpoint.quantization import (
    Quantization,
    QuantizationMap,
    canonical,
    read_quantization,
)
from mlxcel.family.contract import Family, Part
from mlxcel.family.shapes import TensorShape

_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_DEFAULT = "BF16"
_LEFT_OUT = ("modules_to_not_convert", "ignore")


def checkpoint_from_config(path: Path, family: Family) -> Checkpoint:
    """The checkpoint that the config.json at ``path``, a file or its folder, describes.

    Raises:
        CheckpointError: The settings are malformed, lack a field or contradict each other.
        UnsupportedError: The family does not say what its parameters are.
    """
    config = read_config(path)
    quantization = read_quantization(config)
    shapes = tuple(family.shapes(config))
    config = family.settle(config, [shape.name for shape in shapes])
    packed = packings(shapes, config, family, quantization)
    headers = headers_of(shapes, config, family, packed)
    return Checkpoint(config.path.parent, config, headers, (), (), quantization)


def headers_of(
    shapes: Iterable[TensorShape],
    config: ModelConfig,
    family: Family,
    packed: Mapping[str, Quantization],
) -> dict[str, TensorHeader]:
    """What the headers of the parameters ``shapes`` would be, without those that nobody reads."""
    return {
        header.name: header
        for shape in shapes
        if family.place(shape.name, config).part is not Part.UNUSED
        for header in _headers(shape, config, packed.get(shape.name))
    }


def packings(
    shapes: Iterable[TensorShape],
    config: ModelConfig,
    family: Family,
    quantization: QuantizationMap | None,
) -> dict[str, Quantization]:
    """How the parameters ``shapes`` are packed by the settings; those that are not are left out."""
    found = ((shape.name, _packing(shape, config, family, quantization)) for shape in shapes)
    return {name: packing for name, packing in found if packing is not None}


def has_weights(path: Path) -> bool:
    """Whether ``path`` is a folder with weight files; a config.json stands for itself alone."""
    return path.is_dir() and any(file.is_file() for file in path.glob("*.safetensors"))


def _headers(
    shape: TensorShape, config: ModelConfig, packed: Quantization | None
) -> Iterator[TensorHeader]:
    """The parameter as stored: by itself, or as packed weight with scales (and biases)."""
    dtype = _dtype(config)

    def header(name: str, dtype: str, dims: tuple[int, ...]) -> TensorHeader:
        size = math.prod(dims) * DTYPE_BITS[dtype] // 8
        return TensorHeader(name, dtype, dims, size, config.path)

    if packed is None:
        yield header(shape.name, dtype, shape.shape)
        return
    *rows, inputs = shape.shape
    module = shape.name.removesuffix(".weight")
    groups = (*rows, inputs // packed.group_size)
    yield header(shape.name, "U32", (*rows, inputs * packed.bits // 32))
    yield header(f"{module}.scales", dtype if packed.mode == "affine" else "U8", groups)
    if packed.mode == "affine":
        yield header(f"{module}.biases", dtype, groups)


def _dtype(config: ModelConfig) -> str:
    """The safetensors name of the type that floating parameters are stored in."""
    for settings in (config.raw, config.text):
        for key in ("dtype", "torch_dtype"):
            if (name := settings.get(key)) is not None:
                return _DTYPES.get(str(name).removeprefix("torch."), _DEFAULT)
    return _DEFAULT


def _packing(
    shape: TensorShape, config: ModelConfig, family: Family, quantization: QuantizationMap | None
) -> Quantization | None:
    """How the parameter is packed, if it is."""
    if quantization is None or not shape.packs:
        return None
    module = shape.name.removesuffix(".weight")
    found = quantization.for_path(module)
    if found is None or shape.shape[-1] % found.group_size:
        return None
    if quantization.method is not None and (
        family.place(shape.name, config).part in (Part.TABLE, Part.HEAD)
        or _left_out(module, config)
    ):
        return None
    return found


def _left_out(module: str, config: ModelConfig) -> bool:
    """Whether another tool's settings say that it left this module as it was.

    They list parts of module paths, with ``*`` or, behind ``re:``, as regular expressions, of
    which only ``.*`` is understood.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return False
    for key in _LEFT_OUT:
        for entry in settings.get(key) or ():
            path = str(entry)
            if path.startswith("re:"):
                path = path[3:].strip("^$").replace(".*", "*").replace("\\.", ".")
            if fnmatchcase(f".{canonical(module)}.", f"*.{canonical(path)}.*"):
                return True
    return False
