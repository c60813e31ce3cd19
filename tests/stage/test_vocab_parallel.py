"""A vocabulary in shares against the whole one."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxcel.stage.together import Joint
from mlxcel.stage.vocab_parallel import VocabParallelEmbedding, VocabParallelHead

HIDDEN = 64
SIZES = [(10, 2), (13, 3), (13, 4)]

Make = Callable[[type[nn.Module], int], nn.Module]


@pytest.fixture(params=[None, 4], ids=["float32", "4 bits"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes an embedding or a linear layer, packed or not."""

    def make(kind: type[nn.Module], rows: int) -> nn.Module:
        module = kind(rows, HIDDEN) if kind is nn.Embedding else kind(HIDDEN, rows, bias=False)
        mx.random.seed(rows)
        module.weight = mx.random.normal((rows, HIDDEN))
        return module.to_quantized(group_size=32, bits=request.param) if request.param else module

    return make


def shares(
    make: Make, whole: nn.Module, kind: type[nn.Module], rows: int, size: int
) -> list[nn.Module]:
    parts = []
    for rank in range(size):
        begin, end = rank * rows // size, (rank + 1) * rows // size
        part = make(kind, end - begin)
        part.update({name: value[begin:end] for name, value in whole.parameters().items()})
        parts.append(part)
    return parts


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_embedding(make: Make, rows: int, size: int) -> None:
    """Each token's row is with one rank, and the same bits; tied, logits are the same bits too."""
    whole = make(nn.Embedding, rows)
    starts = [rank * rows // size for rank in range(size)]
    tables = shares(make, whole, nn.Embedding, rows, size)
    split = VocabParallelEmbedding(tables, starts, rows, Joint(range(size), None))
    tokens = mx.arange(rows).reshape(1, rows)
    assert mx.array_equal(split(tokens), whole(tokens)).item()
    h = mx.random.normal((2, 3, HIDDEN))
    assert mx.array_equal(split.as_linear(h), whole.as_linear(h)).item()


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_head(make: Make, rows: int, size: int) -> None:
    """The logits of all ranks side by side are the whole head's to the last bit."""
    whole = make(nn.Linear, rows)
    heads = shares(make, whole, nn.Linear, rows, size)
    split = VocabParallelHead(heads, rows, Joint(range(size), None))
    h = mx.random.normal((2, 3, HIDDEN))
    assert mx.array_equal(split(h), whole(h)).item()
