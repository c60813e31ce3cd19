"""From the engine's thread to the coroutines that wait: one hand-over a round."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlxcel.engine.sequence import Output

OnOutput = Callable[["Stream", Output], None]


class Stream:
    """The outputs of one request, in the event loop.

    Args:
        index: The request's number.
        capacity: Outputs that may wait to be taken.
        on_overflow: Called once when there are more; what follows is dropped.

    Attributes:
        began: When it was opened (seconds of the loop's clock).
        latest: When its latest token came; None before the first.
        finished: Whether the last output has come.
    """

    def __init__(self, index: int, capacity: int, on_overflow: Callable[[], None]) -> None:
        self.index = index
        self.finished = False
        self.began = asyncio.get_running_loop().time()
        self.latest: float | None = None
        self._capacity = capacity
        self._on_overflow = on_overflow
        self._overflown = False
        self._outputs: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        """Add an output; never waits."""
        self.finished = output.finish_reason is not None
        if self._overflown:
            return
        if len(self._outputs) >= self._capacity:
            self._overflown = True
            self._outputs.clear()
            self._on_overflow()
            return
        self._outputs.append(output)
        self._wake()

    async def take(self, seconds: float) -> list[Output]:
        """All that has come since the last call; waits for ``seconds`` at most if there is none."""
        if not self._outputs:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            alarm = loop.call_later(seconds, self._wake)
            try:
                await self._waiter
            finally:
                alarm.cancel()
                self._waiter = None
        taken, self._outputs = self._outputs, []
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Dispatcher:
    """Knows which stream each output belongs to.

    Args:
        capacity: See :class:`Stream`.
        on_output: Told each output before its reader is, for metrics.
    """

    def __init__(self, capacity: int, on_output: OnOutput) -> None:
        self._capacity = capacity
        self._on_output = on_output
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self) -> None:
        """Deliver to the running loop from now on."""
        self._loop = asyncio.get_running_loop()

    def deliver(self, outputs: list[Output]) -> None:
        """Take a round's outputs, in the engine's thread."""
        self.call(self._dispatch, outputs)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Have ``function`` called in the loop, from any thread; not if the loop has ended."""
        assert self._loop is not None, "attach() comes first"
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    @contextmanager
    def open(self, on_overflow: Callable[[], None]) -> Iterator[Stream]:
        """A stream with a number of its own, for as long as the context lasts."""
        stream = Stream(next(self._numbers), self._capacity, on_overflow)
        self._streams[stream.index] = stream
        try:
            yield stream
        finally:
            del self._streams[stream.index]

    def _dispatch(self, outputs: list[Output]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request)) is not None:
                self._on_output(stream, output)
                stream.put(output)
