"""Objects that stand in for a layer: of its class and with its settings, without its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.nn as nn


def stand_in(module: nn.Module, call: Callable[..., Any]) -> nn.Module:
    """An instance of the class of ``module`` that does ``call`` where it would run.

    Some models ask a layer what it is, by its class or by an attribute, before they choose what
    to give it.
    """
    own = type(module)
    cls: Any = type(own.__name__, (own,), {"__call__": lambda self, *a, **k: call(*a, **k)})
    double = cast(nn.Module, cls.__new__(cls))
    nn.Module.__init__(double)
    for name, value in (vars(module) | dict(module)).items():
        if isinstance(value, bool | int | float | str | tuple | None):
            setattr(double, name, value)
        elif isinstance(value, nn.Module):
            setattr(double, name, stand_in(value, call))
    return double
