"""Layers of any model whose layers pass on nothing but hidden states.

The model's own forward pass runs. Layers of other stages have stand-ins: those before ours
hand in the hidden states that came over the wire, and behind our last one the pass ends. What
the model does before its first layer and after its last one is thereby left to the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import mlx.core as mx
import mlx.nn as nn

from mlxcel.family.transformer import Cache, Mask, Payload, TransformerStage
from mlxcel_family_generic.probe import LENGTH, CannotSplit, ends, find_layers, refusing, watch
from mlxcel_family_generic.stand_in import stand_in


class _Done(Exception):
    """The forward pass has reached the end of our layers."""

    def __init__(self, h: mx.array) -> None:
        super().__init__()
        self.h = h


class Foreign:
    """In place of what is not ours; ``h`` are the hidden states that came over the wire."""

    def __init__(self) -> None:
        self.h: mx.array | None = None

    def end(self, *args: Any, **kwargs: Any) -> mx.array:
        """An end of the model: its result reaches none of our layers, and may be changed."""
        return mx.zeros_like(self.layer())

    def layer(self, *args: Any, **kwargs: Any) -> mx.array:
        """A foreign layer: whatever it is given, it hands on ``h``."""
        assert self.h is not None, "set before the pass"
        return self.h


class GenericStage(TransformerStage):
    """The shared base, with the model's own forward pass."""

    def __init__(self, model: nn.Module, start: int, stop: int) -> None:
        self._foreign = Foreign()
        self._stand_ins = [stand_in(layer, self._foreign.layer) for layer in model.layers]
        with refusing(getattr(model, "model_type", "generic")):
            super().__init__(model, start, stop)
            self._check()

    def find_inner(self, text: nn.Module) -> nn.Module:
        """The module that owns the list of layers."""
        inner, self.layers_name = find_layers(self.model)
        return inner

    def find_caches(self, model: nn.Module) -> list[Cache | None]:
        self._slots = super().find_caches(model)
        self._watched = watch(
            model, self.inner, self.layers_name, lambda: copy.deepcopy(self._slots)
        )
        return [None if slot is None else self._slots[slot] for slot in self._watched.slots]

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        return Mask("none")  # the model makes its own

    def __call__(self, payload: Mapping[str, mx.array], caches: list[Cache | None]) -> Payload:
        if self.first:
            return {"h": self._pass(payload["tokens"], None, caches)}
        h = payload["h"]
        return {"h": self._pass(mx.zeros(h.shape[:2], dtype=mx.int32), h, caches)}

    def logits(self, h: mx.array) -> mx.array:
        """What the model makes of the last layer's output."""
        self._foreign.h = h
        with self._instead([*self._stand_ins]):
            return cast(mx.array, self.model(mx.zeros(h.shape[:2], dtype=mx.int32)))

    def _pass(
        self, tokens: mx.array, h: mx.array | None, caches: Sequence[Cache | None]
    ) -> mx.array:
        """The model's pass from ``h`` (on the first stage from ``tokens``) to our last layer."""
        self._foreign.h = h
        counters = caches[self.stop - self.start :]
        layers: list[Any] = [*self._stand_ins]
        layers[self.start : self.stop] = [*self.layers[:-1], self._last]
        with self._instead(layers):
            try:
                self.model(tokens, cache=self._all_caches(caches))
            except _Done as done:
                for counter in counters:
                    _count(counter, *tokens.shape)
                return done.h
        raise AssertionError("the pass ends behind our last layer")

    def make_caches(self) -> list[Cache | None]:
        """Our layers' caches, then one for each kind of cache that only foreign layers have.

        Masks and positions are made of whichever cache of a kind comes first in the model. As
        all caches of a kind agree on positions, one of ours stands in for a foreign one; where
        we have none of its kind, a cache of empty arrays counts along, which takes no memory.
        """
        return [*super().make_caches(), *(copy.deepcopy(self._slots[s]) for s in self._counters)]

    def _all_caches(self, caches: Sequence[Cache | None]) -> list[Cache]:
        """A cache for every slot of the model; ``caches`` as :meth:`make_caches` gives them."""
        slots = [*self._watched.slots[self.start : self.stop], *self._counters]
        ours = {slot: cache for slot, cache in zip(slots, caches, strict=True) if slot is not None}
        of_kind = {_kind(self._slots[slot]): cache for slot, cache in reversed(ours.items())}
        return [
            ours[slot] if slot in ours else of_kind[_kind(template)]
            for slot, template in enumerate(self._slots)
        ]

    def _end_pass(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Our last layer; the pass ends behind it."""
        raise _Done(self.layers[-1](*args, **kwargs))

    @contextmanager
    def _instead(self, layers: list[Any]) -> Iterator[None]:
        own = self.inner[self.layers_name]
        self.inner[self.layers_name] = layers
        try:
            yield
        finally:
            self.inner[self.layers_name] = own

    def _give_up_foreign_parts(self) -> None:
        own = {slot for slot in self._watched.slots[self.start : self.stop] if slot is not None}
        kinds = {_kind(self._slots[slot]) for slot in own}
        first_of = {_kind(t): slot for slot, t in reversed(list(enumerate(self._slots)))}
        self._counters = [slot for kind, slot in first_of.items() if kind not in kinds]
        keep: set[tuple[str, str]] = set()
        if self.first:
            keep |= self._watched.before
        if self.last:
            keep |= self._watched.after
        for owner, key, child in list(ends(self.model, self.inner)):
            if key not in keep:
                setattr(owner, key[1], stand_in(child, self._foreign.end))
        self.inner[self.layers_name] = self.layers
        self._last = stand_in(self.layers[-1], self._end_pass)

    def _check(self) -> None:
        """Describe one pass of this stage, so that what cannot work is refused before loading."""
        tokens = mx.zeros((1, LENGTH), dtype=mx.int32)
        h = mx.zeros_like(self._watched.h)
        try:
            self._pass(tokens, None if self.first else h, self.make_caches())
            if self.last:
                self.logits(h)
        except Exception as error:
            raise CannotSplit(f"a stage of it cannot run by itself ({error!s:.200})") from error


def _count(cache: Cache, rows: int, length: int) -> None:
    """Move a cache that nobody reads on by ``length`` positions, in which nothing is kept."""
    for part in getattr(cache, "caches", (cache,)):
        if hasattr(part, "update_and_fetch"):
            nothing = mx.zeros((rows, 0, length, 0))
            part.update_and_fetch(nothing, nothing)
        else:
            for entry, value in enumerate(part.cache):
                if value is None:
                    part[entry] = mx.zeros((rows, 0))
            part.advance(length)


def _kind(template: Cache) -> tuple[Any, ...]:
    """What caches with the same positions have in common: their class and size."""
    parts = [_kind(part) for part in getattr(template, "caches", ())]
    return (type(template), getattr(template, "max_size", None), *parts)
