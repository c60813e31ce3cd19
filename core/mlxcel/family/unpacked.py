"""What the headers of another tool's tensors become where a model's ``sanitize`` unpacks them.

For :meth:`mlxcel.family.Family.loaded`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from mlxcel.checkpoint.headers import TensorHeader

_SCALE = "_scale_inv"
_ACTIVATIONS = "activation_scale"


def float8_as_bfloat16(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Float8 matrices and their scales as matrices of bfloat16.

    The scales of a matrix have its name with ``_scale_inv`` behind it.
    """
    return {
        name: attrs.evolve(header, dtype="BF16", nbytes=2 * header.nbytes)
        if f"{name}{_SCALE}" in tensors
        else header
        for name, header in tensors.items()
        if not name.endswith((_SCALE, _ACTIVATIONS))
    }


def packed_integers(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Integers around zero under MLX's names, a zero point beside each scale."""
    loaded: dict[str, TensorHeader] = {}
    for name, header in tensors.items():
        module, _, leaf = name.rpartition(".")
        for new in _INTEGERS.get(leaf, (leaf,)):
            new_name = f"{module}.{new}" if module else new
            loaded[new_name] = attrs.evolve(header, name=new_name)
    return loaded


def packed_float8(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Float8 matrices that stay packed (MLX's ``mxfp8``), under MLX's names: the same bytes."""
    loaded: dict[str, TensorHeader] = {}
    for name, header in tensors.items():
        new_name = name.replace(f".weight{_SCALE}", ".scales")
        loaded[new_name] = attrs.evolve(header, name=new_name)
    return loaded


def packed_experts(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Experts in NVFP4, as ModelOpt writes them, under MLX's names: the same bytes.

    They are no modules there: the scales of ``gate_up_proj`` are ``gate_up_proj_weight_scale``.
    """
    names = {
        f"{module}{end}": f"{module}.{leaf}"
        for name in tensors
        if (module := name.removesuffix(_BLOCK_SCALE)) != name
        for end, leaf in _NVFP4.items()
    }
    return {
        (new := names.get(name, name)): attrs.evolve(header, name=new)
        for name, header in tensors.items()
        if not name.endswith(_INPUT_SCALE)
    }


_BLOCK_SCALE, _INPUT_SCALE = "_weight_scale", "_input_scale"
_NVFP4: Mapping[str, str] = {
    "": "weight",
    _BLOCK_SCALE: "scales",
    f"{_BLOCK_SCALE}_2": "global_scale",
}
_INTEGERS: Mapping[str, tuple[str, ...]] = {
    "weight_packed": ("weight",),
    "weight_scale": ("scales", "biases"),
    "weight_shape": (),
}
