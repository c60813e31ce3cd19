"""One forward pass of an unevaluated model, watched: what each layer is given and gives.

Nothing is computed but masks and positions: MLX only notes what would be. So a model of any
size can be watched before its weights are read. All that comes out of a layer or of a module
beside the layers is made NaN on the way, so that what is given to a layer besides the hidden
states shows whether it was made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import attrs
import mlx.core as mx
import mlx.nn as nn

from mlxcel.errors import UnsupportedError
from mlxcel.family.transformer import Cache, flat_parameters
from mlxcel_family_generic.stand_in import eavesdropper, stand_in

LENGTH = 3
"""Tokens of a watched pass."""

Module = tuple[str, str]
"""A module beside the layers: the path of its owner, and its name there."""


@attrs.frozen
class Watched:
    """What a pass showed.

    ``slots`` says for each layer which cache of the model's list it was given, None for none;
    ``caches`` is that list after the pass, its arrays described and not computed. ``before``
    and ``after`` are the modules used before the first layer and after the last one. ``h`` has
    the shape and type of the hidden states.
    """

    slots: tuple[int | None, ...]
    caches: tuple[Cache, ...]
    before: frozenset[Module]
    after: frozenset[Module]
    h: mx.array


class CannotSplit(Exception):
    """Why a model cannot be split."""


@contextmanager
def refusing(model_type: str) -> Iterator[None]:
    """Within it, what cannot be split is refused by the name of its architecture.

    Raises:
        UnsupportedError: It cannot.
    """
    try:
        yield
    except CannotSplit as reason:
        raise UnsupportedError(
            f"A model of type {model_type!r} cannot be split safely: {reason}.",
            "Run it in one piece with mlx-lm, or write a family plugin for it "
            "(docs/plugin-api.md).",
        ) from reason


@attrs.define
class _Pass:
    """What happened in one pass: the calls of the layers, and the modules used around them."""

    calls: list[_Call] = attrs.field(factory=list)
    before: set[Module] = attrs.field(factory=set)
    after: set[Module] = attrs.field(factory=set)

    def use(self, module: Module) -> None:
        (self.after if self.calls else self.before).add(module)

    def clear_after(self) -> None:
        """What was used between two layers is not behind the last one."""
        self.after.clear()


@attrs.frozen
class _Call:
    """A call of a layer: its index, what it was given (by name or place), what it gave."""

    layer: int
    given: dict[str, Any]
    out: Any

    def hidden(self) -> tuple[str, Any]:
        """Name and value of the hidden states among what was given: the first array."""
        arrays = ((n, v) for n, v in self.given.items() if isinstance(v, mx.array) and v.ndim == 3)
        return next(arrays, ("", None))

    def others(self, caches: Sequence[Cache]) -> dict[str, Any]:
        """What was given besides hidden states and a cache."""
        own, _ = self.hidden()
        return {n: v for n, v in self.given.items() if n != own and _slot(v, caches) is None}


def watch(
    model: nn.Module,
    inner: nn.Module,
    layers_name: str,
    make_caches: Callable[[], Sequence[Cache]],
) -> Watched:
    """Watch passes of ``model``, whose layers are the list ``layers_name`` of ``inner``.

    Raises:
        CannotSplit: More than hidden states pass from layer to layer, or the layers are not
            called one after the other.
    """
    first, caches = _watched(model, inner, layers_name, make_caches(), token=0)
    second, again = _watched(model, inner, layers_name, make_caches(), token=1)
    count = len(inner[layers_name])
    if [call.layer for call in first.calls] != list(range(count)):
        raise CannotSplit("its layers are not called one after the other, each once")
    if foreign := {type(c).__name__ for c in caches if not hasattr(type(c), "merge")}:
        raise CannotSplit(f"its caches cannot be batched ({', '.join(sorted(foreign))})")
    slots = tuple(_slot_of(call, caches) for call in first.calls)
    own = [slot for slot in slots if slot is not None]
    if len(own) != len(set(own)):
        raise CannotSplit("some of its layers share a cache")
    for index, call in enumerate(first.calls):
        _check(call, first.calls[index - 1] if index else None)
        _check_others(call, call.others(caches), second.calls[index].others(again))
    h = first.calls[0].out
    return Watched(slots, tuple(caches), frozenset(first.before), frozenset(first.after), h)


def find_layers(model: nn.Module) -> tuple[nn.Module, str]:
    """The module inside ``model`` that owns the list of layers, and what it calls that list.

    Raises:
        CannotSplit: The layers are not one list.
    """
    every = [id(layer) for layer in model.layers]
    for _, module in model.named_modules():
        for name, value in module.items():
            if isinstance(value, list) and list(map(id, value)) == every:
                return cast(nn.Module, module), name
    raise CannotSplit("its layers are not one list")


def _watched(
    model: nn.Module, inner: nn.Module, layers_name: str, caches: Sequence[Cache], token: int
) -> tuple[_Pass, Sequence[Cache]]:
    seen = _Pass()
    with _eavesdropping(model, inner, layers_name, seen):
        try:
            model(mx.full((1, LENGTH), token, dtype=mx.int32), cache=list(caches))
        except CannotSplit:
            raise
        except Exception as error:
            raise CannotSplit(f"its forward pass cannot be followed ({error!s:.200})") from error
    return seen, caches


def _check(call: _Call, previous: _Call | None) -> None:
    """Hidden states go into the layer as the one before gave them, and nothing else comes out."""
    name, h = call.hidden()
    if not name:
        raise CannotSplit(f"layer {call.layer} is given no hidden states")
    if not isinstance(call.out, mx.array) or call.out.shape != h.shape:
        raise CannotSplit(f"layer {call.layer} hands on more than hidden states")
    if previous is not None and h is not previous.out:
        raise CannotSplit(f"hidden states change between layers {call.layer - 1} and {call.layer}")


def _check_others(call: _Call, one: dict[str, Any], two: dict[str, Any]) -> None:
    """Masks and positions are the same whatever the tokens and hidden states are."""
    for name, value in one.items():
        if not _is_same(value, two.get(name)):
            raise CannotSplit(
                f"layer {call.layer} is given more than hidden states, a mask and positions "
                f"(its argument {name})"
            )


def _is_same(one: Any, two: Any) -> bool:
    if isinstance(one, mx.array) and isinstance(two, mx.array):
        return one.shape == two.shape and bool(mx.array_equal(one, two).item())  # NaN is not
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(_is_same, one, two))
    return isinstance(one, str | int | float | None) and one == two


def _slot_of(call: _Call, caches: Sequence[Cache]) -> int | None:
    slots = (_slot(value, caches) for value in call.given.values())
    return next((slot for slot in slots if slot is not None), None)


def _slot(value: Any, caches: Sequence[Cache]) -> int | None:
    return next((slot for slot, cache in enumerate(caches) if cache is value), None)


@contextmanager
def _eavesdropping(
    model: nn.Module, inner: nn.Module, layers_name: str, seen: _Pass
) -> Iterator[None]:
    """With doubles in place of the layers and of the modules around them."""
    layers = inner[layers_name]

    def layer(index: int) -> nn.Module:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = {str(place): value for place, value in enumerate(args, 1)} | kwargs
            out = _spoilt(layers[index](*args, **kwargs))
            seen.clear_after()
            seen.calls.append(_Call(index, given, out))
            return out

        def part(*args: Any, **kwargs: Any) -> Any:
            raise CannotSplit(f"parts of layer {index} are used without the others")

        return stand_in(layers[index], call, part)

    def end(module: nn.Module, key: Module) -> nn.Module:
        def call(*args: Any, **kwargs: Any) -> Any:
            return _spoilt(module(*args, **kwargs))

        return eavesdropper(module, call, lambda: seen.use(key))

    around = list(ends(model, inner))
    try:
        inner[layers_name] = [layer(index) for index in range(len(layers))]
        for owner, key, child in around:
            setattr(owner, key[1], end(child, key))
        yield
    finally:
        inner[layers_name] = layers
        for owner, key, child in around:
            setattr(owner, key[1], child)


def _spoilt(value: Any) -> Any:
    """NaN in the place of floating numbers, of the same shape and type."""
    if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
        return mx.full(value.shape, float("nan"), dtype=value.dtype)
    if isinstance(value, tuple):
        return tuple(map(_spoilt, value))
    return value


def ends(model: nn.Module, inner: nn.Module) -> Iterator[tuple[nn.Module, Module, nn.Module]]:
    """The modules with parameters beside the way from ``model`` down to the layers of ``inner``.

    Each as (its owner, its key, itself).
    """
    for path, owner in model.named_modules():
        if not _contains(owner, inner):
            continue
        for name, child in list(owner.items()):
            if (
                isinstance(child, nn.Module)
                and not _contains(child, inner)
                and flat_parameters(child)
            ):
                yield owner, (path, name), child


def _contains(module: nn.Module, wanted: nn.Module) -> bool:
    return any(part is wanted for _, part in module.named_modules())
