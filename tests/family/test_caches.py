"""What ranks and workers keep of what a layer keeps."""

from __future__ import annotations

import pytest

from mlxcel.family.caches import (
    CacheGroup,
    CacheKind,
    KVCacheKind,
    RotatingCacheKind,
    StateCacheKind,
    rank_kind,
    worker_kind,
)

SPLIT = StateCacheKind(((8, None), (6, 4)), split=True)
WHOLE = StateCacheKind(((8, None), (6, 4)))
LATENT = KVCacheKind(1, 16, 8)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (None, None),
        (KVCacheKind(8, 4, 4), KVCacheKind(4, 4, 4)),
        (LATENT, LATENT),
        (RotatingCacheKind(2, 4, 4, 16), RotatingCacheKind(1, 4, 4, 16)),
        (SPLIT, StateCacheKind(((4, None), (3, 4)), split=True)),
        (WHOLE, WHOLE),
        (CacheGroup((KVCacheKind(2, 4, 4), LATENT)), CacheGroup((KVCacheKind(1, 4, 4), LATENT))),
    ],
)
def test_what_a_rank_keeps(kind: CacheKind | None, expected: CacheKind | None) -> None:
    """Heads are shared out, at least one each; states only where ranks share their numbers."""
    assert rank_kind(kind, 2) == expected
    assert rank_kind(kind, 1) == kind


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (None, None),
        (KVCacheKind(8, 4, 4), CacheGroup((KVCacheKind(4, 4, 4),) * 2)),
        (LATENT, CacheGroup((LATENT, LATENT))),
        (WHOLE, WHOLE),
        (CacheGroup((LATENT, LATENT)), CacheGroup((LATENT,) * 4)),
    ],
)
def test_what_a_worker_of_all_ranks_keeps(
    kind: CacheKind | None, expected: CacheKind | None
) -> None:
    """It keeps what each of its ranks does, but what they all would compute alike only once."""
    assert worker_kind(kind, 2, 2) == expected
    assert worker_kind(kind, 1, 2) == rank_kind(kind, 2)
