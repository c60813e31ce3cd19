"""A cache whose new keys and values somebody else needs too."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxcel.family.transformer import Cache


class Tap:
    """Stands before ``cache`` for one step; ``new`` is what the step puts into it."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.new: tuple[mx.array, mx.array]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Keep what is new, and do what the cache does."""
        self.new = keys, values
        return self.cache.update_and_fetch(keys, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)
