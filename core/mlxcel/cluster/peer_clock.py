"""How far a peer's clock is ahead, from pings and pongs."""

from __future__ import annotations

from collections import deque

import attrs

PINGS = 16
"""The offset comes from the fastest of so many last pings: clocks drift, slow pings mislead."""


@attrs.frozen(order=True)
class _Reading:
    trip: float
    offset: float


class PeerClock:
    """Estimates the offset of a peer's monotonic clock from ours, as NTP does (RFC 5905, 8).

    The peer reads its clock somewhere between our sending of the ping and the arrival of its
    pong, so half the time between is the most that the estimate can be wrong.
    """

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque(maxlen=PINGS)

    def hear(self, sent: float, received: float, clock: float) -> None:
        """A pong said ``clock``; we sent its ping at ``sent`` and had it at ``received``."""
        self._readings.append(_Reading(received - sent, clock - (sent + received) / 2))

    @property
    def offset(self) -> float:
        """Seconds that the peer's clock is ahead of ours; 0 where no difference can be told."""
        if not self._readings:
            return 0.0
        best = min(self._readings)
        return best.offset if abs(best.offset) > best.trip / 2 else 0.0
