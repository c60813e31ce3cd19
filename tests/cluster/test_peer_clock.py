"""How far a peer's clock is ahead."""

from __future__ import annotations

import random

import pytest

from mlxcel.cluster.peer_clock import PINGS, PeerClock


def ping(clock: PeerClock, sent: float, there: float, back: float, ahead: float) -> None:
    """A ping that travels ``there`` seconds, its pong ``back``, the peer's clock ``ahead``."""
    clock.hear(sent, sent + there + back, sent + there + ahead)


def test_without_a_pong_nothing_is_assumed() -> None:
    """Before the first pong, the clocks count as equal."""
    assert PeerClock().offset == 0.0


@pytest.mark.parametrize("ahead", [12345.678, -0.25])
def test_the_error_is_at_most_half_the_fastest_trip(ahead: float) -> None:
    """Whatever the ways there and back take, the estimate is within half the best round trip."""
    random.seed(1)
    clock, fastest = PeerClock(), float("inf")
    for number in range(PINGS):
        there, back = random.uniform(1e-4, 5e-3), random.uniform(1e-4, 5e-3)
        fastest = min(fastest, there + back)
        ping(clock, float(number), there, back, ahead)
        assert abs(clock.offset - ahead) <= fastest / 2 + 1e-9


def test_clocks_that_cannot_be_told_apart_are_equal() -> None:
    """On one machine the offset is nothing, not the asymmetry of the pings."""
    clock = PeerClock()
    ping(clock, 5.0, 3e-4, 1e-4, 0.0)
    assert clock.offset == 0.0


def test_old_pings_are_forgotten() -> None:
    """A clock that drifts is followed, even if the old pings were faster."""
    clock = PeerClock()
    ping(clock, 0.0, 1e-6, 1e-6, 10.0)
    for number in range(PINGS):
        ping(clock, 1.0 + number, 1e-3, 1e-3, 10.5)
    assert clock.offset == pytest.approx(10.5)
