"""Who is still there: a detector of failures that has neither a clock nor sockets of its own.

Three things fail apart from each other: the peer's supervisor, whose pongs stop; its worker,
of which the pongs say how long it has been silent; and the way of the data between stages, on
which steps are under way while every supervisor answers.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

PING_SECONDS = 0.5
"""Between two pings, or a quarter of the grace if that is less."""


def ping_seconds(grace: float) -> float:
    """How often to ping, so that a single late pong is no failure."""
    return min(PING_SECONDS, grace / 4)


@attrs.frozen
class Loss:
    """The peer of stage ``peer`` is lost; ``what`` says which part of it, and how one knows."""

    peer: int
    what: str


@attrs.define
class _Watch:
    heard: float
    lost: bool = False


class FailureDetector:
    """Watches the supervisors and workers of ``peers`` peers.

    A peer is lost once, however many signs of it there are. Time in which nobody called
    :meth:`check` (this process was stopped, the machine slept) is not held against the peers.

    Args:
        peers: How many there are.
        grace: Seconds of silence after which a supervisor or a worker is lost.
        now: Seconds of a monotonic clock, as everywhere here.
    """

    def __init__(self, peers: int, grace: float, now: float) -> None:
        self._grace = grace
        self._checked = now
        self._absence = (now, 0.0)  # when it ended, and its seconds
        self._watches = [_Watch(now) for _ in range(peers)]

    def heard(self, peer: int, now: float, worker_silent: float | None = None) -> Loss | None:
        """A pong has come; ``worker_silent`` are the seconds since its worker's last sign."""
        self._watches[peer].heard = now
        if worker_silent is None or worker_silent <= self._grace:
            return None
        return self.lose(
            peer,
            f"its worker process has given no sign of life for {worker_silent:.1f} s "
            f"(stopped, or hanging)",
        )

    def lose(self, peer: int, what: str) -> Loss | None:
        """The peer is lost for the reason ``what``; None if that has been told before."""
        watch = self._watches[peer]
        if watch.lost:
            return None
        watch.lost = True
        return Loss(peer, what)

    def hung_up(self, peer: int, how: str, now: float) -> Loss | None:
        """The peer's connection has ended; it does that, too, if this process was away too long."""
        ended, away = self._absence
        if (unseen := now - self._checked) > self._grace:
            ended, away = now, unseen
        if away > self._grace and now - ended < self._grace:
            how += f", after this node had stood still for {away:.1f} s (stopped, or asleep)"
        return self.lose(peer, how)

    def check(self, now: float) -> Iterator[Loss]:
        """Those who have been silent for too long."""
        asleep = max(0.0, now - self._checked - self._grace / 2)
        if asleep:
            self._absence = (now, now - self._checked)
        self._checked = now
        for peer, watch in enumerate(self._watches):
            watch.heard += asleep
            if now - watch.heard > self._grace:
                silent = f"it has not answered for {now - watch.heard:.1f} s (stopped, or cut off)"
                if (loss := self.lose(peer, silent)) is not None:
                    yield loss


class DataPath:
    """Watches the steps on their way through ``stages`` stages.

    A stage that computes says so in its beats, however long its step takes; so steps in flight
    that nobody works on, for ``patience`` seconds, are stuck between two stages.
    """

    def __init__(self, stages: int, patience: float) -> None:
        self._patience = patience
        self._in_flight = 0
        self._moved = 0.0
        self._steps = [0] * (stages + 1)  # entry i: those that have left stage i - 1

    def submitted(self, now: float, *, work: bool) -> None:
        """A step has gone to the first stage; ``work`` if it has tensors."""
        if self._in_flight == 0:
            self._moved = now
        self._in_flight += 1
        self._steps[0] += work

    def answered(self, now: float) -> None:
        """An answer has come from the last stage."""
        self._in_flight -= 1
        self._moved = now

    def beat(self, stage: int, busy: float, steps: int, now: float) -> None:
        """What a stage says of itself: seconds of work and finished steps since its last beat."""
        self._steps[stage + 1] += steps
        if busy > 0 or steps > 0:
            self._moved = now

    def stuck(self, now: float) -> str | None:
        """The link that steps do not come through, such as ``0-1``; None if all is well.

        Where the counts do not say which link it is, it is that of the answers.
        """
        if self._in_flight == 0 or now - self._moved <= self._patience:
            return None
        stages = len(self._steps) - 1
        names = ["engine", *map(str, range(stages)), "engine"]
        link = next(
            (i for i in range(stages) if self._steps[i + 1] < self._steps[i]),
            stages,
        )
        return f"{names[link]}-{names[link + 1]}"
