"""How a whole model is split over tensor-parallel ranks, as data.

A plan says of every parameter what a rank holds of it, and where ranks have to talk. It follows
from what a family says of its parameters (:meth:`mlxcel.family.Family.shapes`): each of them
carries its :class:`~mlxcel.tensor.shard.Shard`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from mlxcel.errors.words import counted
from mlxcel.tensor.options import TensorParallel
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
class Obstacle:
    """``parts``, such as "9 query heads", of the module ``module`` that ranks cannot share."""

    module: str
    parts: str


@attrs.frozen
class ShardPlan:
    """What each rank holds of a model, and where the ranks talk.

    Attributes:
        parameters: All parameters of the model by their path, each with its shard.
        communications: In the order of a forward pass.
        groups: Of those that are packed, how many inputs have one scale.
    """

    parameters: Mapping[str, TensorShape]
    communications: tuple[Communication, ...]
    groups: Mapping[str, int] = MappingProxyType({})

    def shard_of(self, path: str) -> Shard:
        """How the parameter ``path`` is split; also for what a packed matrix has beside it.

        Raises:
            KeyError: The model has no such parameter.
        """
        module, _, leaf = path.rpartition(".")
        if path not in self.parameters and f"{module}.weight" in self.parameters:
            shard = self.parameters[f"{module}.weight"].shard
            # nvfp4's overall scale is one number, or one for each expert of a stack
            if leaf in _COMPANIONS or shard.strategy is ShardStrategy.EXPERT:
                return shard
            if leaf == "global_scale":
                return REPLICATED
        return self.parameters[path].shard

    def after(self, path: str) -> tuple[Communication, ...]:
        """How the ranks put together what the parameter ``path`` has a part in."""
        if self.shard_of(path).strategy in (ShardStrategy.COLUMN, ShardStrategy.REPLICATED):
            return ()
        talks = [talk for talk in self.communications if path.startswith(f"{talk.path}.")]
        nearest = max((len(talk.path) for talk in talks), default=0)
        return tuple(talk for talk in talks if len(talk.path) == nearest)

    def divides(self, ranks: int) -> bool:
        """Whether the model can be split over ``ranks``."""
        return not any(self.obstacles(ranks))

    def obstacles(self, ranks: int) -> Iterator[Obstacle]:
        """What cannot be shared out to ``ranks``, in the order of a forward pass."""
        for path, shard, size, group in self._split():
            module = path.rpartition(".")[0]
            if not shard.divides(size, ranks):
                yield Obstacle(module, _parts(shard, size))
            elif group is not None and not shard.divides(size, ranks, group):
                yield Obstacle(
                    module, f"{counted(size // group, 'quantization group')} (of {group} inputs)"
                )

    def legal_sizes(self, most: int) -> tuple[int, ...]:
        """The numbers of ranks, up to ``most``, that the model can be split over."""
        kinds = {(shard, size, group) for _, shard, size, group in self._split()}  # few
        return tuple(
            ranks
            for ranks in range(1, most + 1)
            if all(shard.divides(size, ranks, group) for shard, size, group in kinds)
        )

    def _split(self) -> Iterator[tuple[str, Shard, int, int | None]]:
        """What is not replicated: path, shard, size of its axis, and group."""
        for path, parameter in self.parameters.items():
            shard = parameter.shard
            if shard.strategy is not ShardStrategy.REPLICATED:
                yield path, shard, parameter.shape[shard.axis], self.groups.get(path)


def plan_of(shapes: Iterable[TensorShape], options: TensorParallel) -> ShardPlan:
    """The plan of a model whose parameters are ``shapes``, in the order of a forward pass.

    A tied table is shared out only if both the embedding and the head are to be.
    """
    whole = {shape.name: shape for shape in shapes}
    tied = not any(_is_head(path) for path in whole)
    parameters: dict[str, TensorShape] = {}
    communications: dict[Communication, None] = {}
    for path, parameter in whole.items():
        own = attrs.evolve(parameter, shard=_chosen(path, parameter.shard, options, tied=tied))
        parameters[path] = own
        # Where experts are shared out whole, their results are added at the same places.
        after = own if own.shard.strategy is not ShardStrategy.EXPERT else parameter
        communications |= dict.fromkeys(_after(path, after, tied=tied))
    return ShardPlan(parameters, tuple(communications))


def _chosen(path: str, shard: Shard, options: TensorParallel, *, tied: bool) -> Shard:
    """``shard`` as the operator's modes make it."""
    if shard.strategy is not ShardStrategy.VOCAB:
        return shard.chosen(options)
    if tied:
        shared = "vocab_parallel" == options.embedding == options.head
    else:
        shared = (options.head if _is_head(path) else options.embedding) == "vocab_parallel"
    return shard if shared else REPLICATED


def _parts(shard: Shard, size: int) -> str:
    """What an axis of ``size`` consists of, in words."""
    match shard.strategy:
        case ShardStrategy.VOCAB:
            return f"{counted(size, 'row')} of the vocabulary"
        case ShardStrategy.EXPERT:
            return counted(size, "expert")
    if shard.units is not None:
        return counted(shard.units, shard.what.removesuffix("s"))
    return f"intermediate size {shard.segments[0] if shard.segments else size}"


def _is_head(path: str) -> bool:
    return path.rpartition(".")[0].endswith("lm_head")


def _after(path: str, parameter: TensorShape, *, tied: bool) -> Iterator[Communication]:
    """What the split of ``parameter`` asks for: its block's results are added, unless at once."""
    module = path.rpartition(".")[0]
    match parameter.shard:
        case Shard(strategy=ShardStrategy.ROW, within=True):
            yield Communication(module, CommPattern.ALL_REDUCE)
        case Shard(strategy=ShardStrategy.ROW, at_once=True):
            yield Communication(module.rpartition(".")[0], CommPattern.ALL_REDUCE)
        case Shard(strategy=ShardStrategy.ROW):
            block = _BLOCK.match(path)
            assert block is not None, f"{path} is split by rows outside a layer"
            yield Communication(block[0], CommPattern.ALL_REDUCE)
        case Shard(strategy=ShardStrategy.VOCAB):
            if not _is_head(path):
                yield Communication(module, CommPattern.ALL_REDUCE)
            if tied or _is_head(path):
                yield Communication(module, CommPattern.ALL_GATHER)
