"""Some experts of a stack against all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlxcel.stage.expert_parallel import ExpertParallel

HIDDEN, INNER, EXPERTS = 32, 64, 6

STACKS: dict[str, Callable[[], nn.Module]] = {
    "glu": lambda: SwitchGLU(HIDDEN, INNER, EXPERTS),
    "glu with bias": lambda: SwitchGLU(HIDDEN, INNER, EXPERTS, bias=True),
    "mlp": lambda: SwitchMLP(HIDDEN, INNER, EXPERTS, bias=True),
}


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest) -> nn.Module:
    mx.random.seed(1)
    whole = STACKS[request.param]()
    random = tree_map(lambda value: mx.random.normal(value.shape) * 0.2, whole.parameters())
    whole.update(random)
    return whole


def ranks_of(whole: nn.Module, size: int) -> list[ExpertParallel]:
    """What each of ``size`` ranks has in the place of ``whole``."""
    ranks = []
    for rank in range(size):
        own = copy.deepcopy(whole)
        own.update(tree_map(lambda value: value[rank::size], whole.parameters()))  # noqa: B023
        ranks.append(ExpertParallel(own, rank, size))
    return ranks


def draw(*shape: int) -> tuple[mx.array, mx.array]:
    """Tokens [*shape, hidden], and two experts for each of them."""
    x = mx.random.normal((*shape, HIDDEN))
    return x, mx.argsort(mx.random.normal((*shape, EXPERTS)), axis=-1)[..., :2]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 40)], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_together(stack: nn.Module, size: int, shape: tuple[int, ...]) -> None:
    """Added up they give what the whole stack gives, for one token and for many (sorted ones)."""
    x, indices = draw(*shape)
    results = [rank(x, indices) for rank in ranks_of(stack, size)]
    assert {r.shape for r in results} == {(*shape, 2, HIDDEN)}
    assert mx.allclose(sum(results[1:], results[0]), stack(x, indices), atol=1e-5).item()


def test_packed_experts(stack: nn.Module) -> None:
    """So do experts that are packed."""
    nn.quantize(stack, group_size=32, bits=4)
    x, indices = draw(2, 20)
    results = [rank(x, indices) for rank in ranks_of(stack, 3)]
    assert mx.allclose(sum(results[1:], results[0]), stack(x, indices), atol=1e-5).item()


def test_no_expert_is_here(stack: nn.Module) -> None:
    """A rank none of whose experts is chosen has zeros, of the type of the others' results."""
    stack.set_dtype(mx.float32)
    x, indices = mx.ones((1, 3, HIDDEN), mx.bfloat16), mx.zeros((1, 3, 2), mx.uint32)
    first, second = (cast(mx.array, rank(x, indices)) for rank in ranks_of(stack, 2))
    assert not second.any().item()
    assert (second.dtype, second.shape) == (first.dtype, first.shape)
    assert mx.allclose(first, stack(x, indices), atol=1e-5).item()
