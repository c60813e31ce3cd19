"""What a layer keeps of a sequence, in words that need no MLX: for budgets and admission."""

from __future__ import annotations

import attrs


@attrs.frozen
class KVCacheKind:
    """Keys and values of every position: ``heads`` of ``key_dim`` and ``value_dim`` numbers."""

    heads: int
    key_dim: int
    value_dim: int


@attrs.frozen
class RotatingCacheKind:
    """Keys and values of the last ``window`` positions."""

    heads: int
    key_dim: int
    value_dim: int
    window: int


@attrs.frozen
class StateCacheKind:
    """States of a recurrent layer, of the same size whatever the length.

    ``states`` are (numbers per sequence, bytes of one or None for the activations' own size).
    """

    states: tuple[tuple[int, int | None], ...]


@attrs.frozen
class CacheGroup:
    """Several caches of one layer, such as latents and the keys of an indexer."""

    kinds: tuple[KVCacheKind | RotatingCacheKind | StateCacheKind, ...]


CacheKind = KVCacheKind | RotatingCacheKind | StateCacheKind | CacheGroup
