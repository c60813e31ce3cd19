"""What the layers of any of mlx-lm's models keep of a sequence: asked of the model itself."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxcel.family.caches import (
    CacheGroup,
    CacheKind,
    KVCacheKind,
    RotatingCacheKind,
    StateCacheKind,
)
from mlxcel.family.transformer import Cache
from mlxcel_family_generic.probe import find_layers, watch
from mlxcel_family_generic.stage import GenericStage

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig

FLOAT32_BYTES = 4


def cache_kinds(config: ModelConfig) -> tuple[CacheKind | None, ...]:
    """One kind per layer, from the caches of a pass of the empty model.

    Raises:
        UnsupportedError: The model cannot be split.
        Exception: Whatever mlx-lm raises for a config of which it can build no model.
    """
    model = GenericStage.build_model(config)
    slots = make_prompt_cache(model)
    watched = watch(model, *find_layers(model), lambda: copy.deepcopy(slots))
    return tuple(None if slot is None else _kind(watched.caches[slot]) for slot in watched.slots)


def _kind(cache: Cache) -> CacheKind | None:
    """The kind of a cache that one sequence has filled; None where nothing was put into it."""
    if (parts := getattr(cache, "caches", None)) is not None:
        kinds = [kind for kind in map(_kind, parts) if kind is not None]
        return CacheGroup(tuple(kinds))  # type: ignore[arg-type] # no groups in groups
    if not hasattr(cache, "update_and_fetch"):
        return StateCacheKind(tuple((_numbers(array), FLOAT32_BYTES) for array in cache.cache))
    if cache.keys is None:
        return None
    _, heads, _, key_dim = cache.keys.shape
    value_dim = cache.values.shape[-1]
    if (window := getattr(cache, "max_size", None)) is not None:
        return RotatingCacheKind(heads, key_dim, value_dim, window)
    return KVCacheKind(heads, key_dim, value_dim)


def _numbers(array: mx.array | Any) -> int:
    """How many numbers of a state there are; they take four bytes at most."""
    return 0 if array is None else math.prod(array.shape)
