"""One producer for all who watch; it runs only while somebody does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlxcel.server.errors import ApiError

TICK_SECONDS = 1.0
WATCHERS = 32

_log = logging.getLogger(__name__)


class Feed:
    """Makes an event a second and hands each to every watcher.

    Whoever is too slow for one gets the next instead, so nothing queues.

    Args:
        make: Makes an event; called in the event loop.
        seconds: Between two events.
        watchers: How many may watch at once.
    """

    def __init__(
        self, make: Callable[[], bytes], seconds: float = TICK_SECONDS, watchers: int = WATCHERS
    ) -> None:
        self.watching_now = 0
        self._make = make
        self.seconds = seconds
        self._watchers = watchers
        self._latest: bytes | None = None
        self._made = asyncio.Event()
        self._failing = False
        self._closed = False
        self._producer: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Be a watcher for as long as the context lasts.

        Raises:
            ApiError: Too many watch already.
        """
        if self.watching_now >= self._watchers:
            text = f"{self._watchers} others watch already, and more cannot."
            raise ApiError(503, text, "too_many_watchers", retry_after=5.0)
        self.watching_now += 1
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce())
        try:
            yield
        finally:
            self.watching_now -= 1
            if not self.watching_now:
                self._producer.cancel()
                self._producer = None

    async def next(self) -> bytes | None:
        """The next event; None after the last one."""
        if self._closed:
            return None
        await self._made.wait()
        return self._latest

    def close(self) -> None:
        """Make one last event at once and no more after it."""
        self._make_one()
        self._closed = True
        self._wake()

    async def _produce(self) -> None:
        while not self._closed:
            await asyncio.sleep(self.seconds)
            if self._make_one():
                self._wake()

    def _make_one(self) -> bool:
        """Whether it could be made; else the log says why, once until one can."""
        try:
            self._latest = self._make()
        except Exception:
            if not self._failing:
                _log.exception("an event for those who watch cannot be made")
            self._failing = True
        else:
            self._failing = False
        return not self._failing

    def _wake(self) -> None:
        self._made.set()
        self._made = asyncio.Event()  # those who waited go on; the next wait is for the next event
