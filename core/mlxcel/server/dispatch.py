"""From the engine's thread to those who answer clients: one hand-over a round.

Outputs do not wait for a coroutine to be woken. Each goes, in the event loop, straight to the
function that its stream was opened with, which writes to the client or keeps what there is to
keep; the coroutine that handles the request sleeps until there is something to wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlxcel.engine.sequence import Output

Hear = Callable[[int, Output], None]
"""Told which of a stream's requests an output is for, counted from 0, and the output."""


class Stream:
    """The outputs of one client's requests, in the event loop.

    Args:
        numbers: The numbers of the requests.
        hear: Told every output as it comes; must not wait. What it raises ends the stream.

    Attributes:
        began: When it was opened (seconds of the loop's clock).
        latest: When each request's latest token came; None before its first.
        open: The numbers of the requests that have not ended.
        error: What ``hear`` raised; it hears no more then.
    """

    def __init__(self, numbers: range, hear: Hear) -> None:
        self.numbers = numbers
        self.began = asyncio.get_running_loop().time()
        self.latest: list[float | None] = [None] * len(numbers)
        self.open = set(numbers)
        self.error: Exception | None = None
        self._hear = hear
        self._waiter: asyncio.Future[None] | None = None

    @property
    def running(self) -> bool:
        """Whether there is something to wait for."""
        return bool(self.open) and self.error is None

    def put(self, output: Output) -> None:
        """Pass an output on; never waits, never raises."""
        if output.finish_reason is not None:
            self.open.discard(output.request)
        if self.error is None:
            try:
                self._hear(output.request - self.numbers.start, output)
            except Exception as error:
                self.error = error
        if not self.running:
            self.wake()

    async def wait(self, seconds: float) -> None:
        """Until somebody wakes the stream, it runs no more, or ``seconds`` pass."""
        if not self.running:
            return
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        alarm = loop.call_later(seconds, self.wake)
        try:
            await self._waiter
        finally:
            alarm.cancel()
            self._waiter = None

    def wake(self) -> None:
        """End the present wait, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


OnOutput = Callable[[Stream, Output, float], None]
"""Told each output, and the time, before its stream is; for metrics."""


class Dispatcher:
    """Knows which stream each output belongs to.

    Args:
        on_output: See :data:`OnOutput`.
        on_tokens: Told how many tokens a round brought, once it is over; for metrics.
    """

    def __init__(self, on_output: OnOutput, on_tokens: Callable[[int], None]) -> None:
        self._on_output = on_output
        self._on_tokens = on_tokens
        self._streams: dict[int, Stream] = {}
        self._next = 1
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
    def open(self, requests: int, hear: Hear) -> Iterator[Stream]:
        """A stream for so many requests, each with a number, for as long as the context lasts."""
        numbers = range(self._next, self._next + requests)
        self._next = numbers.stop
        stream = Stream(numbers, hear)
        self._streams.update(zip(numbers, itertools.repeat(stream)))
        try:
            yield stream
        finally:
            for number in numbers:
                del self._streams[number]

    def _dispatch(self, outputs: list[Output]) -> None:
        assert self._loop is not None
        now, tokens = self._loop.time(), 0
        for output in outputs:
            if (stream := self._streams.get(output.request)) is not None:
                tokens += len(output.tokens)
                self._on_output(stream, output, now)
                stream.put(output)
        if tokens:
            self._on_tokens(tokens)
