"""Objects in the place of a module, so that a model's own forward pass can be watched or cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.nn as nn


def stand_in(
    module: nn.Module, call: Callable[..., Any], part: Callable[..., Any] | None = None
) -> nn.Module:
    """An instance of the class of ``module`` that does ``call`` where it would run.

    It has the settings of ``module`` and none of its weights: some models ask a layer what it
    is, by its class or by an attribute, before they choose what to give it. Its parts do
    ``part``, without one ``call`` too.
    """
    part = part or call
    double = _double(module, {"__call__": lambda self, *a, **k: call(*a, **k)})
    nn.Module.__init__(double)
    for name, value in (vars(module) | dict(module)).items():
        if isinstance(value, bool | int | float | str | tuple | None):
            setattr(double, name, value)
        elif isinstance(value, nn.Module):
            setattr(double, name, stand_in(value, part))
    return double


def eavesdropper(
    module: nn.Module, call: Callable[..., Any], used: Callable[[], None]
) -> nn.Module:
    """A double of ``module`` that shares its parts: ``call`` runs it, and ``used`` hears of both.

    A part that is taken out, as a tied head takes the embedding's weight, is a use too.
    """

    def take(self: nn.Module, name: str) -> Any:
        used()
        return dict.__getitem__(self, name)

    def look(self: nn.Module, name: str) -> Any:
        if name in self:
            used()
        return nn.Module.__getattr__(self, name)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        used()
        return call(*args, **kwargs)

    double = _double(module, {"__call__": run, "__getattr__": look, "__getitem__": take})
    vars(double).update(vars(module))
    dict.update(double, module)
    return double


def _double(module: nn.Module, methods: dict[str, Any]) -> nn.Module:
    own = type(module)
    cls: Any = type(own.__name__, (own,), methods)
    return cast(nn.Module, cls.__new__(cls))
