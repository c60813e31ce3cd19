"""How the ranks of a stage wait for each other when they have loaded."""

from __future__ import annotations

from mlxcel.errors import RanksDisagree
from mlxcel.pipeline.decision import StepDecision, decode, pieces
from mlxcel.pipeline.group import RankGroup

_BARRIER = StepDecision("barrier")


def meet(group: RankGroup) -> None:
    """Return when every rank of ``group`` is here.

    That takes as long as the slowest rank loads; whoever owns the workers watches that they do.

    Raises:
        RankLost: A rank is gone.
        RanksDisagree: A rank is elsewhere in its work.
        WireError: A rank sent something else.
    """
    others = range(1, group.size) if group.rank == 0 else range(1)
    if group.rank:
        group.send(0, pieces(_BARRIER), "loading")
    for rank in others:
        decision = decode(group.receive(rank, "loading", idle=True))
        if decision != _BARRIER:
            raise RanksDisagree(group.stage, rank, "the barrier", f"a decision to {decision.kind}")
    if not group.rank:
        for rank in others:
            group.send(rank, pieces(_BARRIER), "loading")
