"""What a layer keeps of a sequence, in words that need no MLX: for budgets and admission."""

from __future__ import annotations

from collections.abc import Iterator

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
    ``split``: tensor-parallel ranks share the numbers; else each of them computes them all.
    """

    states: tuple[tuple[int, int | None], ...]
    split: bool = False


@attrs.frozen
class CacheGroup:
    """Several caches of one layer, such as latents and the keys of an indexer."""

    kinds: tuple[SingleKind, ...]


SingleKind = KVCacheKind | RotatingCacheKind | StateCacheKind
CacheKind = SingleKind | CacheGroup


def rank_kind(kind: CacheKind | None, ranks: int) -> CacheKind | None:
    """What one of ``ranks`` tensor-parallel ranks keeps, where all of the layer keeps ``kind``.

    Ranks share heads; where there are fewer heads than ranks, several keep the same one.
    """
    match kind:
        case KVCacheKind() | RotatingCacheKind():
            return attrs.evolve(kind, heads=max(1, kind.heads // ranks))
        case StateCacheKind(states, split=True):
            shares = tuple((-(-numbers // ranks), size) for numbers, size in states)
            return attrs.evolve(kind, states=shares)
        case CacheGroup(kinds):
            return CacheGroup(tuple(_parts(*(rank_kind(part, ranks) for part in kinds))))
    return kind


def worker_kind(kind: CacheKind | None, held: int, ranks: int) -> CacheKind | None:
    """What a worker keeps that is ``held`` of ``ranks`` ranks.

    States that ranks do not share it has once: it computes them once for all its ranks.
    """
    own = rank_kind(kind, ranks)
    if own is None or held == 1 or (isinstance(kind, StateCacheKind) and not kind.split):
        return own
    return CacheGroup(tuple(_parts(own)) * held)


def _parts(*kinds: CacheKind | None) -> Iterator[SingleKind]:
    for kind in kinds:
        if isinstance(kind, CacheGroup):
            yield from kind.kinds
        elif kind is not None:
            yield kind
