"""Numbers and names of layers in a sentence."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """``number`` with its noun: ``1 layer``, ``3 layers``; ``many`` for irregular plurals."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def named_layers(layers: str) -> str:
    """Layer numbers such as ``"3"`` or ``"0-2,7"`` with their noun."""
    return f"layer {layers}" if layers.isdigit() else f"layers {layers}"


def verb(layers: str, one: str, many: str) -> str:
    """The form of a verb that goes with :func:`named_layers` of the same numbers."""
    return one if layers.isdigit() else many
