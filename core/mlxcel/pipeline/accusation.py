"""What the ranks of a stage say of each other when their group ends, and what is behind it."""

from __future__ import annotations

from collections.abc import Container, Sequence

import attrs

from mlxcel.errors import RankLost, WorkerFailed
from mlxcel.pipeline.report import Failed

Place = tuple[int, int]
"""A stage and a rank of it."""


@attrs.frozen
class Accusation:
    """``reporter`` misses ``accused``.

    ``broken`` is how it saw their connection end, empty where that rank was late or others told.
    """

    reporter: Place
    accused: Place
    broken: str = ""


def accusation(failed: Failed) -> Accusation | None:
    """What ``failed`` says of another rank; None if it is a failure of its own."""
    reporter = failed.stage, failed.rank
    match failed.error:
        case RankLost(stage, rank, how=how, broken=broken):
            return Accusation(reporter, (stage, rank), how if broken else "")
        case WorkerFailed(lost=(int(stage), int(rank)), broken=broken):
            return Accusation(reporter, (stage, rank), broken)
    return None


def broken_connection(
    accusations: Sequence[Accusation], ended: Container[Place] = ()
) -> Accusation | None:
    """The first accusation that only a broken connection explains, between ranks that live.

    A rank that leaves tells why to all but the one that it misses. So if the connection ended
    without a word, and the rank at its other end neither died nor has another reason to leave,
    it either saw the same, or has not looked yet.

    Args:
        accusations: All that were made, none of a rank that has died or failed by itself.
        ended: Ranks that left for other reasons.
    """
    said = {it.reporter: it for it in accusations}
    for it in accusations:
        answer = said.get(it.accused)
        mutual = answer is None or (answer.accused == it.reporter and answer.broken)
        if it.broken and mutual and it.accused not in ended:
            return it
    return None


def root_accusation(accusations: Sequence[Accusation]) -> Accusation:
    """The accusation that the first one of ``accusations`` follows from, where no connection broke.

    Who is accused and accuses another has only passed on what it missed. Where that leads back to
    who began, one of them was late: who gives up on it closes their connection, which it sees when
    it comes to look, and may report before the other.
    """
    said = {it.reporter: it for it in accusations}
    path = [accusations[0]]
    while following := said.get(path[-1].accused):
        if following in path:
            circle = path[path.index(following) :]
            return next((it for it in circle if not it.broken), circle[0])
        path.append(following)
    return path[-1]
