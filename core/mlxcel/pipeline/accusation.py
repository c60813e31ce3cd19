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
