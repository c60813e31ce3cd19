"""Read a rank's share of a tensor out of its file, and nothing more of it.

A share of the first axes is a few ranges of the file, which go straight into the array. A share
of the last axis is a bit of every row: then some rows are read at a time and their columns taken,
so that never more than a block of what others hold is in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from io import RawIOBase

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxcel.checkpoint.headers import TensorHeader
from mlxcel.errors import CheckpointError

BLOCK_BYTES = 4 << 20
"""How much of whole rows is read at once."""

SEEK_BYTES = 64 << 10
"""What lies together in pieces of at least so much is read piece by piece."""

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_AGAIN = "Copy or download the file again."


def read_share(
    tensor: TensorHeader, dtype: mx.Dtype, axis: int, parts: Sequence[range]
) -> mx.array:
    """The ``parts`` of ``axis`` of a tensor, one after the other.

    Args:
        tensor: Where it stands.
        dtype: What MLX makes of the tensor's type.
        axis: Counted from the end or the beginning.
        parts: Not empty.

    Returns:
        [..., the lengths of all parts, ...], evaluated.

    Raises:
        CheckpointError: The file is gone, or shorter than when its header was read.
    """
    axis %= len(tensor.shape)
    indices = np.array(list(itertools.chain(*parts)))
    shape = (*tensor.shape[:axis], len(indices), *tensor.shape[axis + 1 :])
    share = mx.zeros(shape, _UNSIGNED[dtype.size])
    mx.eval(share)
    # Not a copy: what is written to the view is in the array.
    view = np.array(share, copy=False).reshape(
        math.prod(shape[:axis]), len(indices), math.prod(shape[axis + 1 :])
    )
    try:
        with tensor.file.open("rb", buffering=0) as file:
            _fill(view, _Rows(file, tensor), tensor.shape[axis], indices)
    except OSError as error:
        raise CheckpointError(tensor.file, f"cannot be read ({error.strerror}).", _AGAIN) from error
    del view
    out = share.view(dtype)
    mx.eval(out)
    return out


class _Rows:
    """The bytes of one tensor in its open file."""

    def __init__(self, file: RawIOBase, tensor: TensorHeader) -> None:
        self._file = file
        self._tensor = tensor

    def read(self, begin: int, into: NDArray[np.generic]) -> None:
        """Fill ``into``, contiguous, with what stands from the tensor's byte ``begin`` on."""
        self._file.seek(self._tensor.offset + begin)
        left = into.data.cast("B")
        while left:
            count = self._file.readinto(left)
            if not count:
                raise CheckpointError(
                    self._tensor.file,
                    f"has become shorter: the tensor {self._tensor.name!r} ends beyond it.",
                    _AGAIN,
                )
            left = left[count:]


def _fill(view: NDArray[np.generic], rows: _Rows, size: int, indices: NDArray[np.int64]) -> None:
    """Read the ``indices`` of the middle one of a tensor's axes [outer, ``size``, inner].

    Args:
        view: [outer, indices, inner], of unsigned numbers.
    """
    outer, _, inner = view.shape
    if view.size == 0:
        return
    item = inner * view.itemsize
    pieces = list(_pieces(indices))
    if outer == 1 or len(indices) * item >= SEEK_BYTES * len(pieces):
        for row in range(outer):
            for start, stop in pieces:
                rows.read((row * size + int(indices[start])) * item, view[row, start:stop])
        return
    step = max(1, BLOCK_BYTES // (size * item))
    block = np.empty((min(step, outer), size, inner), view.dtype)
    for row in range(0, outer, step):
        count = min(step, outer - row)
        rows.read(row * size * item, block[:count])
        for start, stop in pieces:
            begin = int(indices[start])
            view[row : row + count, start:stop] = block[:count, begin : begin + stop - start]


def _pieces(indices: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """The places, half-open, of neighbours in ``indices`` that are neighbours in the tensor."""
    ends = np.flatnonzero(np.diff(indices) != 1) + 1
    return itertools.pairwise((0, *ends.tolist(), len(indices)))
