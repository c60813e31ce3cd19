"""Buffers that MLX keeps for later."""

from __future__ import annotations

import mlx.core as mx

SCRATCH_BYTES = 1 << 20
"""What may stay: to give it back costs more than it is worth."""


def give_back_scratch() -> None:
    """Give the system the buffers that MLX keeps for later arrays, if they are more than a little.

    ``mx.clear_cache`` waits for every stream of the process, other stages' among them, and for
    those that threads left behind which have ended: with 150 of them it takes milliseconds.
    """
    if mx.get_cache_memory() > SCRATCH_BYTES:
        mx.clear_cache()
