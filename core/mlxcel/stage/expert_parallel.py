"""A stack of experts of which a rank has only some."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np


class ExpertParallel(nn.Module):
    """In the place of a stack: expert ``i`` is here if ``i % size`` is ``rank``.

    Only pairs of a token and an expert that is here are computed, so ranks share the work too.
    For that it has to look at the router's choice, which evaluates everything before it.

    Args:
        experts: mlx-lm's stack of the own experts.
    """

    def __init__(self, experts: nn.Module, rank: int, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.experts = experts
        self._rank = rank
        self._size = size

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """The experts' results, zeros in the place of those that are elsewhere.

        Args:
            x: [..., hidden].
            indices: The experts of each token, [..., k].

        Returns:
            [..., k, hidden].
        """
        chosen = np.array(indices).reshape(-1)
        here = np.flatnonzero(chosen % self._size == self._rank)
        tokens = x.reshape(-1, x.shape[-1])[mx.array(here // indices.shape[-1])]
        results = self.experts(tokens, mx.array(chosen[here] // self._size)[:, None])[:, 0]
        # Also if none are here the others must get zeros of their type and width.
        out = mx.zeros((chosen.size, results.shape[-1]), results.dtype)
        if here.size:
            out[mx.array(here)] = results
        return out.reshape(*indices.shape, out.shape[-1])
