"""Quantized tensors that become plain float32 ones, for ``--weights dequantized``.

A :class:`Packed` stands in a map of weights where the plain tensor will be. Unpacking is
eager and in place, block by block: MLX's own product of a whole tensor needs two to four
times its size while it runs, this a few megabytes beside the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx

BLOCK_BYTES = 4 << 20
"""How much of the result is computed at once, if its first axis can be cut that fine."""

_ITEMSIZE = 4


@attrs.frozen(eq=False)
class Packed:
    """One quantized tensor, its parts as the checkpoint has them.

    Attributes:
        weight: uint32 [..., columns * bits / 32].
        scales: [..., columns / group_size], floating for the mode ``affine``, else uint8.
        biases: As ``scales``, for the mode ``affine`` only.
        global_scale: float32, one per tensor or per expert, where nvfp4 has one.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    global_scale: mx.array | None
    group_size: int
    bits: int
    mode: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the plain tensor."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group_size)

    @property
    def nbytes(self) -> int:
        """The bytes of the plain tensor."""
        return math.prod(self.shape) * _ITEMSIZE

    def unpack(self) -> mx.array:
        """The plain tensor, float32 and evaluated."""
        out = mx.zeros(self.shape, mx.float32)
        per_expert = self.global_scale is not None and self.global_scale.size > 1
        row_bytes = math.prod(self.shape[1:]) * _ITEMSIZE
        step = 1 if per_expert else max(1, BLOCK_BYTES // row_bytes)
        for start in range(0, self.shape[0], step):
            out[start : start + step] = self._block(start, start + step)
            mx.eval(out)
        return out

    def _block(self, start: int, stop: int) -> mx.array:
        def rows(part: mx.array | None) -> mx.array | None:
            return None if part is None else _exact(part[start:stop])

        overall = self.global_scale
        if overall is not None and overall.size > 1:
            overall = overall[start]
        return mx.dequantize(
            self.weight[start:stop],
            _exact(self.scales[start:stop]),
            rows(self.biases),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            global_scale=overall,
            dtype=mx.float32,
        )


def take_packed(
    weights: Mapping[str, mx.array], packing: Mapping[str, Mapping[str, Any]]
) -> dict[str, mx.array | Packed]:
    """``weights`` with one :class:`Packed` under ``<path>.weight`` for each path of ``packing``.

    Args:
        weights: Tensors by parameter name.
        packing: ``group_size``, ``bits`` and ``mode`` of each module whose weight is packed.

    Raises:
        KeyError: A part of a packed tensor is missing; the argument is its name.
    """
    taken: dict[str, mx.array | Packed] = dict(weights)
    for path, settings in packing.items():
        for part in ("weight", "scales", "biases", "global_scale"):
            taken.pop(f"{path}.{part}", None)
        affine = settings["mode"] == "affine"
        taken[f"{path}.weight"] = Packed(
            weights[f"{path}.weight"],
            weights[f"{path}.scales"],
            weights[f"{path}.biases"] if affine else None,
            weights.get(f"{path}.global_scale"),
            settings["group_size"],
            settings["bits"],
            settings["mode"],
        )
    return taken


def _exact(part: mx.array) -> mx.array:
    """Half-precision scales would round every product to half precision."""
    return part.astype(mx.float32) if mx.issubdtype(part.dtype, mx.floating) else part
