"""One forward pass of an unevaluated model, watched: what each layer is given and gives.

Nothing is computed: MLX only notes what would be. So a model of any size can be watched before
its weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from mlxcel.errors import UnsupportedError
from mlxcel.family.transformer import Cache
from mlxcel_family_generic.stand_in import stand_in

LENGTH = 3
"""Tokens of the watched pass."""


@attrs.frozen
class Watched:
    """What a pass showed.

    ``caches`` are the caches that the layers were given, by layer; None for one without.
    ``before`` and ``after`` are the modules called before the first layer and after the last
    one, as (path of the owner, name). ``shape`` is that of the hidden states.
    """

    caches: tuple[Cache | None, ...]
    before: frozenset[tuple[str, str]]
    after: frozenset[tuple[str, str]]
    shape: tuple[int, ...]


class Watcher:
    """Stands in for a module; calls it, and writes down that it did."""

    def __init__(self, module: Any, called: list[Any], key: Any) -> None:
        self.module, self.called, self.key = module, called, key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.module(*args, **kwargs)
        self.called.append((self.key, args, kwargs, out))
        return out

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        if name == "as_linear":  # a tied head reads the embedding
            return Watcher(value, self.called, self.key)
        return value


def watch(model: nn.Module, inner: nn.Module, layers_name: str, caches: Sequence[Cache]) -> Watched:
    """Watch a pass of ``model``, whose layers are the list ``layers_name`` of ``inner``.

    Raises:
        UnsupportedError: More than hidden states pass from layer to layer, or the layers are not
            called one after the other.
    """
    layers = inner[layers_name]
    called: list[Any] = []
    with _watched(model, inner, layers_name, called):
        try:
            model(mx.zeros((1, LENGTH), dtype=mx.int32), cache=list(caches))
        except Exception as error:
            raise refusal(f"its forward pass cannot be watched: {error!s:.200}") from error
    passes = [entry for entry in called if isinstance(entry[0], int)]
    if [entry[0] for entry in passes] != list(range(len(layers))):
        raise refusal("its layers are not called one after the other, each once")
    given = tuple(_cache_of(entry, caches) for entry in passes)
    own = [id(cache) for cache in given if cache is not None]
    if len(own) != len(set(own)):
        raise refusal("layers share a cache")
    for previous, entry in zip([None, *passes], passes, strict=False):
        _check(entry, previous, caches)
    first, last = called.index(passes[0]), called.index(passes[-1])
    return Watched(
        given,
        frozenset(entry[0] for entry in called[:first]),
        frozenset(entry[0] for entry in called[last + 1 :]),
        passes[0][3].shape,
    )


def _cache_of(entry: Any, caches: Sequence[Cache]) -> Cache | None:
    _, args, kwargs, _ = entry
    for value in (*args, *kwargs.values()):
        for cache in caches:
            if value is cache:
                return cache
    return None


def _check(entry: Any, previous: Any, caches: Sequence[Cache]) -> None:
    """Only hidden states may come from the layer before, and nothing else from any layer."""
    index, args, kwargs, out = entry
    if not args or not isinstance(args[0], mx.array) or args[0].ndim != 3:
        raise refusal(f"layer {index} does not begin with hidden states")
    if not isinstance(out, mx.array) or out.shape != args[0].shape:
        raise refusal(f"layer {index} hands on more than hidden states")
    if previous is not None and args[0] is not previous[3]:
        raise refusal(f"hidden states are changed between layers {index - 1} and {index}")
    others: Mapping[str, Any] = {str(i): value for i, value in enumerate(args[1:], 1)} | kwargs
    for name, value in others.items():
        plain = value is None or isinstance(value, str | int | float)
        if not plain and not any(value is cache for cache in caches) and not _is_mask(value):
            raise refusal(f"layer {index} is given more than hidden states (argument {name})")


def _is_mask(value: Any) -> bool:
    return isinstance(value, mx.array) and value.ndim >= 2 and value.shape[-2:] == (LENGTH, LENGTH)


def refusal(reason: str) -> UnsupportedError:
    """Why a model cannot be split, and what to do instead."""
    return UnsupportedError(
        f"This architecture cannot be split safely: {reason}.",
        "Run it in one piece with mlx-lm, or write a family plugin for it (docs/plugin-api.md).",
    )


@contextmanager
def _watched(
    model: nn.Module, inner: nn.Module, layers_name: str, called: list[Any]
) -> Iterator[None]:
    """With watchers in place of the layers and of the modules around them."""
    layers = inner[layers_name]
    around = [
        (owner, path, name, child)
        for path, owner in owners(model, inner)
        for name, child in list(owner.items())
        if isinstance(child, nn.Module) and not _contains(child, inner)
    ]
    try:
        inner[layers_name] = [
            stand_in(layer, Watcher(layer, called, i)) for i, layer in enumerate(layers)
        ]
        for owner, path, name, child in around:
            setattr(owner, name, Watcher(child, called, (path, name)))
        yield
    finally:
        inner[layers_name] = layers
        for owner, _, name, child in around:
            delattr(owner, name)
            setattr(owner, name, child)


def owners(model: nn.Module, inner: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules from ``model`` down to ``inner``, with their paths."""
    return [(path, module) for path, module in model.named_modules() if _contains(module, inner)]


def _contains(module: nn.Module, wanted: nn.Module) -> bool:
    return any(part is wanted for _, part in module.named_modules())
