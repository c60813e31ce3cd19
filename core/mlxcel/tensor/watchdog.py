"""Notices that the calling thread does not come back from something."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOKS = 8
"""How often a deadline is looked at before it is over: so late it may be noticed."""


class Watchdog:
    """Watches one thread, which waits where no deadline can be given.

    Args:
        timeout: Seconds that each wait may last.
        bark: Called in the watchdog's thread with what is late, once.
    """

    def __init__(self, timeout: float, bark: Callable[[str], None]) -> None:
        self._timeout = timeout
        self._bark = bark
        self._until: float | None = None
        self._over = threading.Event()
        self.operation = ""
        threading.Thread(target=self._watch, name="mlxcel-watchdog", daemon=True).start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What happens within has to end in time; within another one this does nothing."""
        outermost = self._until is None
        if outermost:
            self._until = time.monotonic() + self._timeout
        try:
            yield
        finally:
            if outermost:
                self._until = None

    def close(self) -> None:
        """Stop watching; harmless when repeated."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self._timeout / LOOKS):
            # Read once: the watched thread may change it at any time.
            if (until := self._until) is not None and time.monotonic() > until:
                self._bark(self.operation)
                return
