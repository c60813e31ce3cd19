"""Which sockets a worker has, as its spec says."""

from __future__ import annotations

from typing import Literal

from mlxcel.pipeline.group import group_peers
from mlxcel.stage.contract import StageSpec

SocketKey = tuple[Literal["receive", "send", "group"], int]
"""A direction as the worker sees it and, in its group, the rank at the other end; else 0."""


def sockets_of(spec: StageSpec) -> frozenset[SocketKey]:
    """What the worker of ``spec`` needs to be connected with.

    Every worker has a link from the stage before and one to the next. The engine talks with rank
    0 of the first and of the last stage only, so the other ranks there have no link at that end.
    """
    sockets: set[SocketKey] = set()
    if spec.leads or not spec.first:
        sockets.add(("receive", 0))
    if spec.leads or not spec.last:
        sockets.add(("send", 0))
    if spec.rank is not None:
        sockets |= {("group", other) for other in group_peers(spec.rank, spec.tensor.size)}
    return frozenset(sockets)
