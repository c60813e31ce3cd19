"""Log lines that somebody else can provoke, at a bounded rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class LimitedLog:
    """At most one line per reason and ``interval`` seconds; the next one says how many were not.

    Reasons are few and chosen by the caller, never taken from what a stranger sends.
    """

    def __init__(
        self,
        log: logging.Logger,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._interval = interval
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, reason: str, text: str) -> None:
        """Log ``text``, unless ``reason`` was logged a moment ago."""
        now = self._clock()
        if now - self._last.get(reason, -self._interval) < self._interval:
            self._left_out[reason] = self._left_out.get(reason, 0) + 1
            return
        self._last[reason] = now
        more = self._left_out.pop(reason, 0)
        self._log.warning("%s%s", text, f" ({more} more like this)" if more else "")
