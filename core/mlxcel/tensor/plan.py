"""How a whole model is split over tensor-parallel ranks, as data.

A plan says of every parameter what a rank holds of it, and where ranks have to talk. It follows
from what a family says of its parameters (:meth:`mlxcel.family.Family.shapes`): each of them
carries its :class:`~mlxcel.tensor.shard.Shard`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import attrs

from mlxcel.tensor.shard import REPLICATED, Shard, ShardStrategy

if TYPE_CHECKING:
    from mlxcel.family.shapes import TensorShape

_BLOCK = re.compile(r"^.*?\blayers\.\d+\.\w+")
_COMPANIONS = ("scales", "biases")


class CommPattern(enum.Enum):
    """How the ranks put their results together."""

    ALL_REDUCE = "all_reduce"
    """Add them; every rank gets the sum."""

    ALL_GATHER = "all_gather"
    """Put them side by side; every rank gets all."""


@attrs.frozen
class Communication:
    """After the module ``path`` the ranks put what it made together."""

    path: str
    pattern: CommPattern


@attrs.frozen
class ShardPlan:
    """What each rank holds of a model, and where the ranks talk.

    Attributes:
        parameters: All parameters of the model by their path, each with its shard.
        communications: In the order of a forward pass. Those of a parameter that is shared out
            by its vocabulary count only where the operator asks for that.
    """

    parameters: Mapping[str, TensorShape]
    communications: tuple[Communication, ...]

    def shard_of(self, path: str) -> Shard:
        """How the parameter ``path`` is split; also for what a packed matrix has beside it.

        Raises:
            KeyError: The model has no such parameter.
        """
        module, _, leaf = path.rpartition(".")
        if path not in self.parameters and f"{module}.weight" in self.parameters:
            if leaf in _COMPANIONS:
                return self.parameters[f"{module}.weight"].shard
            if leaf == "global_scale":
                return REPLICATED
        return self.parameters[path].shard

    def divides(self, ranks: int) -> bool:
        """Whether the model can be split over ``ranks``; a vocabulary need not divide."""
        return not any(self.obstacles(ranks))

    def obstacles(self, ranks: int) -> Iterator[str]:
        """The paths of the parameters that cannot be shared out to ``ranks``."""
        for path, parameter in self.parameters.items():
            shard = parameter.shard
            if shard.strategy in (ShardStrategy.REPLICATED, ShardStrategy.VOCAB):
                continue
            if not shard.divides(parameter.shape[shard.axis], ranks):
                yield path

    def legal_sizes(self, most: int) -> tuple[int, ...]:
        """The numbers of ranks, up to ``most``, that the model can be split over."""
        return tuple(ranks for ranks in range(1, most + 1) if self.divides(ranks))


def plan_of(shapes: Iterable[TensorShape]) -> ShardPlan:
    """The plan of a model whose parameters are ``shapes``, in the order of a forward pass."""
    parameters = {shape.name: shape for shape in shapes}
    communications: dict[Communication, None] = {}
    for path, parameter in parameters.items():
        communications |= dict.fromkeys(_after(path, parameter))
    return ShardPlan(parameters, tuple(communications))


def _after(path: str, parameter: TensorShape) -> Iterator[Communication]:
    """What the split of ``parameter`` asks for: its block's results are added, unless at once."""
    module = path.rpartition(".")[0]
    match parameter.shard:
        case Shard(strategy=ShardStrategy.ROW, at_once=True):
            yield Communication(module.rpartition(".")[0], CommPattern.ALL_REDUCE)
        case Shard(strategy=ShardStrategy.ROW):
            block = _BLOCK.match(path)
            assert block is not None, f"{path} is split by rows outside a layer"
            yield Communication(block[0], CommPattern.ALL_REDUCE)
        case Shard(strategy=ShardStrategy.VOCAB):
            is_head = module.endswith("lm_head")
            pattern = CommPattern.ALL_GATHER if is_head else CommPattern.ALL_REDUCE
            yield Communication(module, pattern)
