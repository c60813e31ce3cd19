"""What must be known of a model before it runs: asked of mlx-lm's own model, which stays empty."""

from __future__ import annotations

import copy
import json
import math
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxcel.errors import UnsupportedError
from mlxcel.family import Batching
from mlxcel.family.caches import (
    CacheGroup,
    CacheKind,
    KVCacheKind,
    RotatingCacheKind,
    StateCacheKind,
)
from mlxcel.family.transformer import Cache
from mlxcel_family_generic.probe import find_layers, refusing, watch
from mlxcel_family_generic.stage import GenericStage

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig

FLOAT32_BYTES = 4
SinglePart = KVCacheKind | RotatingCacheKind | StateCacheKind


@attrs.frozen
class Description:
    """What each layer keeps of a sequence, and which sequences may share a pass."""

    caches: tuple[CacheKind | None, ...]
    batching: Batching


def describe(config: ModelConfig) -> Description:
    """The description of a model of ``config``.

    Raises:
        UnsupportedError: The model cannot be split.
        Exception: Whatever mlx-lm raises for a config of which it can build no model.
    """
    key = json.dumps(config.raw, sort_keys=True)
    if key not in _known:
        _known[key] = _describe(config)
    known = _known[key]
    if isinstance(known, UnsupportedError):
        raise known
    return known


_known: dict[str, Description | UnsupportedError] = {}
"""By the config's content: the same is asked more than once."""


def _describe(config: ModelConfig) -> Description | UnsupportedError:
    model = GenericStage.build_model(config)
    slots = make_prompt_cache(model)
    try:
        with refusing(config.model_type):
            watched = watch(model, *find_layers(model), lambda: copy.deepcopy(slots))
    except UnsupportedError as error:
        return error
    kinds = [None if slot is None else _kind(watched.caches[slot]) for slot in watched.slots]
    others = [watched.caches[slot] for slot in set(range(len(slots))) - set(watched.slots)]
    for cache in others:  # not a layer's, so it is the first stage's
        kinds[0] = CacheGroup((*_parts(kinds[0]), *_parts(_kind(cache))))
    return Description(tuple(kinds), _batching(model, kinds))


def _batching(model: nn.Module, kinds: list[CacheKind | None]) -> Batching:
    """Whether rows may be of any length, tried where that shows in shapes.

    What padding does to a state does not show: it is in doubt wherever there are any.
    """
    rows = [2, *[1] * 6]  # seven, which is no number of heads
    single = [make_prompt_cache(model) for _ in rows]
    caches = [type(column[0]).merge(list(column)) for column in zip(*single, strict=True)]
    try:
        for cache in caches:
            cache.prepare(lengths=rows, right_padding=[2 - row for row in rows])
        model(mx.zeros((7, 2), dtype=mx.int32), cache=caches)
        for cache in caches:
            cache.finalize()
        model(mx.zeros((7, 1), dtype=mx.int32), cache=caches)
    except Exception:
        return Batching.SINGLE
    states = (part for kind in kinds for part in _parts(kind) if isinstance(part, StateCacheKind))
    return Batching.EQUAL if any(states) else Batching.PADDED


def _kind(cache: Cache) -> CacheKind | None:
    """The kind of a cache that one sequence has filled; None where nothing was put into it."""
    if (parts := getattr(cache, "caches", None)) is not None:
        return CacheGroup(tuple(part for kind in map(_kind, parts) for part in _parts(kind)))
    if not hasattr(cache, "update_and_fetch"):
        return StateCacheKind(tuple((_numbers(array), FLOAT32_BYTES) for array in cache.cache))
    if cache.keys is None:
        return None
    _, heads, _, key_dim = cache.keys.shape
    value_dim = cache.values.shape[-1]
    if (window := getattr(cache, "max_size", None)) is not None:
        return RotatingCacheKind(heads, key_dim, value_dim, window)
    return KVCacheKind(heads, key_dim, value_dim)


def _parts(kind: CacheKind | None) -> tuple[SinglePart, ...]:
    if isinstance(kind, CacheGroup):
        return kind.kinds
    return () if kind is None else (kind,)


def _numbers(array: mx.array | Any) -> int:
    """How many numbers of a state there are; they take four bytes at most."""
    return 0 if array is None else math.prod(array.shape)
