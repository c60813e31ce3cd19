"""What is behind the accusations of ranks: a table of cases, and the errors they come from."""

from __future__ import annotations

import pytest

from mlxcel.errors import RankLost, WorkerFailed
from mlxcel.pipeline.accusation import (
    Accusation,
    Place,
    accusation,
    broken_connection,
    root_accusation,
)
from mlxcel.pipeline.report import Failed

Said = tuple[int, int, str]
"""Which rank misses which one, and how it saw their connection end."""

PIPE, CLOSED, LATE = "Broken pipe", "it has closed the connection", ""


def of_stage(stage: int, *said: Said) -> list[Accusation]:
    return [Accusation((stage, a), (stage, b), how) for a, b, how in said]


@pytest.mark.parametrize(
    ("said", "ended", "between"),
    [
        pytest.param([(1, 2, PIPE), (2, 1, CLOSED)], (), (1, 2), id="both saw it"),
        pytest.param([(2, 1, CLOSED), (1, 2, PIPE)], (), (2, 1), id="the first one counts"),
        pytest.param([(0, 1, LATE), (1, 2, PIPE), (2, 1, PIPE)], (), (1, 2), id="a third is told"),
        pytest.param([(1, 0, CLOSED)], (), (1, 0), id="the other has not looked yet"),
        pytest.param([(0, 1, LATE), (1, 0, CLOSED)], (), None, id="one was slow"),
        pytest.param([(1, 0, CLOSED), (0, 1, LATE)], (), None, id="one was slow and told first"),
        pytest.param([(0, 1, LATE), (1, 0, LATE)], (), None, id="nothing came through"),
        pytest.param([(1, 0, CLOSED)], [(1, 0)], None, id="the other left for another reason"),
        pytest.param([(1, 2, PIPE), (2, 3, LATE)], (), None, id="the other missed a third"),
        pytest.param([], (), None, id="nobody is missed"),
    ],
)
def test_what_breaks_is_a_connection_if_both_ends_live(
    said: list[Said], ended: list[Place], between: tuple[int, int] | None
) -> None:
    """Two that see their connection end without another reason have lost it, not each other."""
    found = broken_connection(of_stage(1, *said), ended)
    assert (found and (found.reporter, found.accused)) == (
        between and ((1, between[0]), (1, between[1]))
    )


@pytest.mark.parametrize(
    ("said", "rank"),
    [
        pytest.param([(0, 1, LATE), (1, 0, CLOSED)], 1, id="one was slow"),
        pytest.param([(1, 0, CLOSED), (0, 1, LATE)], 1, id="the slow one told first"),
        pytest.param([(2, 0, LATE), (1, 0, CLOSED), (0, 1, LATE)], 1, id="the slow one was heard"),
        pytest.param([(1, 2, CLOSED), (0, 1, LATE), (2, 1, LATE)], 1, id="slow beside a third"),
        pytest.param([(1, 2, PIPE), (2, 3, LATE)], 3, id="the other missed a third"),
        pytest.param([(0, 1, LATE), (1, 2, LATE)], 2, id="who waits is waited for"),
        pytest.param([(0, 1, LATE), (1, 0, LATE)], 1, id="nothing came through"),
        pytest.param([(1, 0, CLOSED)], 0, id="the only one"),
        pytest.param([(0, 1, PIPE), (1, 2, PIPE), (2, 0, PIPE)], 1, id="none knows better"),
    ],
)
def test_who_is_missed_by_those_that_are_missed(said: list[Said], rank: int) -> None:
    """The order of reports does not turn the rank that was late into the one that waited for it."""
    assert root_accusation(of_stage(1, *said)).accused == (1, rank)


def test_ranks_of_other_stages_are_others() -> None:
    """Equal numbers in two stages are no pair."""
    said = [*of_stage(0, (1, 2, PIPE), (2, 3, LATE)), *of_stage(1, (2, 1, LATE))]
    assert broken_connection(said) is None


@pytest.mark.parametrize("broken", [True, False])
def test_a_lost_rank_is_an_accusation(broken: bool) -> None:
    """Who tells it misses another; how matters if it saw the connection end."""
    failed = Failed(1, RankLost(1, 2, "all-reduce 7", PIPE, broken), 3)
    assert accusation(failed) == Accusation((1, 3), (1, 2), PIPE if broken else "")


def test_a_lost_rank_in_words_is_one_too() -> None:
    """What comes from a process says the same."""
    failed = Failed(1, WorkerFailed(1, "RankLost", "lost", lost=(1, 2), broken=PIPE), 3)
    assert accusation(failed) == Accusation((1, 3), (1, 2), PIPE)


@pytest.mark.parametrize("error", [ValueError("x"), WorkerFailed(1, "ValueError", "x")])
def test_a_failure_of_its_own_is_none(error: Exception) -> None:
    """It explains what others see."""
    assert accusation(Failed(1, error, 3)) is None
