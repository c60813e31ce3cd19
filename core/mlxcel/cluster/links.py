"""The connections for data that one node of a cluster has with others.

Each is named after the places at its ends, such as ``0-1``; in a mesh the places have a rank,
as in ``s0r1-s1r1``. The engine talks with rank 0 of the first and of the last stage, and dials
both; each node dials its next stage, and the higher ranks of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs

from mlxcel.pipeline.group import group_peers
from mlxcel.transport.contract import TrafficClass


@attrs.frozen
class Link:
    """One connection as a node sees it.

    Attributes:
        direction: Whether steps come in or go out, or the other end is ``rank`` of its group.
        to: The stage and the rank that this node dials; None if the other end does that.
    """

    name: str
    direction: Literal["receive", "send", "group"]
    traffic: TrafficClass = "pp_activation"
    to: tuple[int, int] | None = None
    rank: int = 0


def links_of(stage: int, rank: int, stages: int, ranks: int) -> tuple[Link, ...]:
    """All links of the node at a place, where there are so many ``stages`` of so many ``ranks``."""
    return tuple(_links(stage, rank, stages, ranks))


def engine_links(stages: int, ranks: int) -> tuple[str, str]:
    """The names of the link that brings the engine's steps, and of that of the answers."""
    return f"engine-{_place(0, 0, ranks)}", f"{_place(stages - 1, 0, ranks)}-engine"


def _links(stage: int, rank: int, stages: int, ranks: int) -> Iterator[Link]:
    own = _place(stage, rank, ranks)
    there, back = engine_links(stages, ranks)
    if stage > 0:
        yield Link(f"{_place(stage - 1, rank, ranks)}-{own}", "receive")
    elif rank == 0:
        yield Link(there, "receive")
    if stage < stages - 1:
        yield Link(f"{own}-{_place(stage + 1, rank, ranks)}", "send", to=(stage + 1, rank))
    elif rank == 0:
        yield Link(back, "send")
    for other in group_peers(rank, ranks):
        low, high = (_place(stage, number, ranks) for number in sorted((rank, other)))
        to = (stage, other) if other > rank else None
        yield Link(f"{low}-{high}", "group", "tp_collective", to, other)


def _place(stage: int, rank: int, ranks: int) -> str:
    return f"s{stage}r{rank}" if ranks > 1 else str(stage)
