"""A bounded queue between two threads, for what credits keep within bounds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from mlxcel.errors import ChannelClosed, ChannelFull, DeadlineError

T = TypeVar("T")


class Channel(Generic[T]):
    """Up to ``capacity`` items on their way to whoever gets them; ``name`` is for errors.

    Where credits keep the number of items in flight within the capacity, no put has to wait.
    Safe for any number of threads at both ends.
    """

    def __init__(self, capacity: int, name: str) -> None:
        if capacity < 1:
            raise ValueError(f"a channel cannot hold {capacity} items")
        self.capacity = capacity
        self.name = name
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._reason: str | None = None
        self._listener: Callable[[], None] | None = None

    def put(self, item: T, *, wait: bool = False) -> None:
        """Append ``item``; never blocks, unless it may ``wait`` for a place until the close.

        Raises:
            ChannelClosed: Nobody will get it any more.
            ChannelFull: More is in flight than there are credits: a bug of the putter.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: len(self._items) < self.capacity or self._closed)
            if self._closed:
                raise ChannelClosed(self.name, self._reason)
            if len(self._items) >= self.capacity:
                raise ChannelFull(self.name, self.capacity)
            self._items.append(item)
            self._changed.notify_all()
            listener = self._listener
        if listener is not None:
            listener()

    def get(self, timeout: float, operation: str = "the next message") -> T:
        """The oldest item, waiting up to ``timeout`` seconds for one.

        Raises:
            ChannelClosed: The channel is closed, and all that was put has been taken.
            DeadlineError: Nothing came in time; the text names the channel and ``operation``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._items or self._closed, timeout):
                raise DeadlineError(
                    self.name,
                    operation,
                    timeout,
                    "The peer hangs or is slower than that; look at its log, or allow more time.",
                )
            if self._items:
                return self._take()
            raise ChannelClosed(self.name, self._reason)

    def poll(self) -> T | None:
        """The oldest item, or None if there is none now.

        Raises:
            ChannelClosed: The channel is closed, and all that was put has been taken.
        """
        with self._changed:
            if self._items:
                return self._take()
            if self._closed:
                raise ChannelClosed(self.name, self._reason)
            return None

    def _take(self) -> T:
        self._changed.notify_all()  # who waits for a place
        return self._items.popleft()

    def listen(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called after every put and at the close, in whichever thread."""
        with self._changed:
            self._listener = listener

    def close(self, reason: str | None = None) -> None:
        """Refuse further puts and wake all who wait; only the first call's ``reason`` counts."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._reason = reason
            self._changed.notify_all()
            listener = self._listener
        if listener is not None:
            listener()
