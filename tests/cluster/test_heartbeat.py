"""Who counts as lost, and when."""

from __future__ import annotations

import pytest

from mlxcel.cluster.heartbeat import DataPath, FailureDetector, Loss, ping_seconds


def test_silence_beyond_the_grace_is_a_loss() -> None:
    """A peer is lost when its last pong is longer ago than the grace, and not before."""
    detector = FailureDetector(2, grace=4.0, now=100.0)
    for now in (101.0, 102.0, 103.0, 104.0):
        detector.heard(1, now)
        assert list(detector.check(now)) == []
    [loss] = detector.check(104.5)
    assert loss.peer == 0
    assert "has not answered for 4.5 s" in loss.what


def test_a_stopped_worker_is_told_apart_from_its_supervisor() -> None:
    """A supervisor that answers can say that its worker does not."""
    detector = FailureDetector(1, grace=4.0, now=0.0)
    assert detector.heard(0, 1.0, None) is None
    assert detector.heard(0, 2.0, 3.9) is None
    loss = detector.heard(0, 3.0, 4.1)
    assert loss is not None
    assert "its worker process has given no sign of life for 4.1 s" in loss.what


def test_each_peer_is_lost_once() -> None:
    """A closed connection, silence and a silent worker of one peer are one loss."""
    detector = FailureDetector(2, grace=1.0, now=0.0)
    assert detector.lose(0, "it closed the connection") == Loss(0, "it closed the connection")
    assert detector.lose(0, "again") is None
    assert detector.heard(0, 0.1, 99.0) is None
    detector.heard(1, 0.5)
    assert list(detector.check(0.5)) == []
    detector.heard(1, 1.0)
    assert [loss.peer for loss in detector.check(1.4)] == []
    assert [loss.peer for loss in detector.check(1.9)] == []


def test_a_peer_that_leaves_and_returns_counts_once() -> None:
    """Pongs after a loss do not bring a peer back, so it cannot be lost again."""
    detector = FailureDetector(1, grace=5.0, now=0.0)
    assert detector.lose(0, "it closed the connection") is not None
    detector.heard(0, 0.8)
    assert list(detector.check(2.0)) == []
    assert detector.lose(0, "it closed the connection") is None
    assert [list(detector.check(now)) for now in (4.0, 6.0, 8.0, 10.0)] == [[], [], [], []]


def test_our_own_sleep_is_not_held_against_the_peers() -> None:
    """When nobody has looked for a long time, silence in that time says nothing."""
    detector = FailureDetector(1, grace=4.0, now=0.0)
    assert list(detector.check(1.0)) == []
    assert list(detector.check(3601.0)) == [], "the machine slept for an hour"
    assert list(detector.check(3602.0)) == []
    assert len([*detector.check(3604.0), *detector.check(3606.0)]) == 1, "but nothing came since"


@pytest.mark.parametrize(("grace", "expected"), [(60.0, 0.5), (5.0, 0.5), (1.0, 0.25)])
def test_pings_are_frequent_enough(grace: float, expected: float) -> None:
    """There are at least four pings within the grace."""
    assert ping_seconds(grace) == expected


class Path(DataPath):
    """Three stages with a patience of ten seconds."""

    def __init__(self) -> None:
        super().__init__(3, 10.0)


def test_nothing_in_flight_is_never_stuck() -> None:
    """An idle pipeline may rest for ever."""
    path = Path()
    assert path.stuck(1e9) is None
    path.submitted(0.0, work=True)
    path.answered(1.0)
    assert path.stuck(1e9) is None


def test_a_long_step_is_not_stuck() -> None:
    """A stage that says it computes has all the time it wants."""
    path = Path()
    path.submitted(0.0, work=True)
    for now in range(1, 100):
        path.beat(0, busy=0.5, steps=0, now=float(now))
        assert path.stuck(now + 5.0) is None
    assert path.stuck(99.0 + 10.1) == "engine-0", "it began, and never finished"


@pytest.mark.parametrize(
    ("finished", "link"),
    [((0, 0, 0), "engine-0"), ((1, 0, 0), "0-1"), ((1, 1, 0), "1-2"), ((1, 1, 1), "2-engine")],
)
def test_the_link_that_does_not_carry_is_named(finished: tuple[int, ...], link: str) -> None:
    """The counts of finished steps say which link the missing step should have come through."""
    path = Path()
    path.submitted(0.0, work=True)
    for stage, steps in enumerate(finished):
        path.beat(stage, busy=0.01 * steps, steps=steps, now=1.0)
    assert path.stuck(10.0) is None
    assert path.stuck(11.1) == link


def test_answers_are_progress() -> None:
    """As long as answers come, steps that wait their turn are not stuck."""
    path = Path()
    for _ in range(5):
        path.submitted(0.0, work=True)
    path.answered(9.0)
    assert path.stuck(18.0) is None
    assert path.stuck(19.1) is not None


def test_steps_without_work_count_for_no_stage() -> None:
    """A step that only gives batches back shows in no beat, so it is expected in none."""
    path = Path()
    path.submitted(0.0, work=False)
    assert path.stuck(10.1) == "2-engine"


def test_who_was_away_is_named_when_a_peer_hangs_up() -> None:
    """Peers give up a coordinator that stood still; when it goes on, they are not to blame."""
    detector = FailureDetector(3, grace=4.0, now=0.0)
    list(detector.check(1.0))
    at_once = detector.hung_up(0, "it closed", 9.0)
    assert at_once == Loss(
        0, "it closed, after this node had stood still for 8.0 s (stopped, or asleep)"
    )
    list(detector.check(9.1))
    soon = detector.hung_up(1, "it closed", 9.2)
    assert soon is not None and "this node had stood still for 8.1 s" in soon.what
    list(detector.check(10.0))
    assert detector.hung_up(2, "it closed", 14.0) == Loss(2, "it closed"), "much later"
