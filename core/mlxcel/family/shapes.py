"""The parameters of a model by name and shape, worked out from config.json alone.

A family lists every parameter of the whole model as mlx-lm names it; bytes, work and
placement then follow by the same rules as from the headers of a real checkpoint. The
functions here are the blocks that families are made of.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs


@attrs.frozen
class TensorShape:
    """One parameter: ``packs`` if quantization packs it (the weight of a linear or embedding)."""

    name: str
    shape: tuple[int, ...]
    packs: bool = False


def linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Iterator[TensorShape]:
    """A linear layer: [outputs, inputs], and its bias."""
    yield TensorShape(f"{name}.weight", (outputs, inputs), packs=True)
    if bias:
        yield TensorShape(f"{name}.bias", (outputs,))


def experts(
    name: str, count: int, outputs: int, inputs: int, *, bias: bool = False
) -> Iterator[TensorShape]:
    """The same linear layer of ``count`` experts, stacked."""
    yield TensorShape(f"{name}.weight", (count, outputs, inputs), packs=True)
    if bias:
        yield TensorShape(f"{name}.bias", (count, outputs))


def embedding(name: str, rows: int, dim: int) -> Iterator[TensorShape]:
    """A table of ``rows`` vectors."""
    yield TensorShape(f"{name}.weight", (rows, dim), packs=True)


def norm(name: str, dim: int) -> Iterator[TensorShape]:
    """The gain of an RMS norm."""
    yield TensorShape(f"{name}.weight", (dim,))
