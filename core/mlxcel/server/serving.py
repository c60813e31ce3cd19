"""What the handlers of one app share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import attrs
from aiohttp import web

from mlxcel.engine.slot import Request
from mlxcel.errors import Unavailable
from mlxcel.observe.metrics import ServerMetrics
from mlxcel.server.backend import Backend
from mlxcel.server.dispatch import Dispatcher, Hear, Stream
from mlxcel.server.options import Options
from mlxcel.server.tools import ToolFormat, find_tool_format

SMALL_BODY = 4096
"""Bytes of a body that is worked on in the event loop; larger ones go to a thread."""

THREADS = 2
"""Threads that work on bodies: more would only make all of them slower."""

ENDING = "The server is shutting down."

T = TypeVar("T")


@attrs.define(eq=False)
class Serving:
    """One app's settings, backend and figures.

    Attributes:
        created: When the app was made (seconds since 1970), which is said of the model.
        ended: Set when the backend has failed.
        threads: Where work on bodies runs that would hold the event loop up.
    """

    options: Options
    backend: Backend
    dispatcher: Dispatcher
    metrics: ServerMetrics
    created: int = attrs.field(factory=lambda: int(time.time()))
    ended: asyncio.Event = attrs.field(factory=asyncio.Event)
    threads: ThreadPoolExecutor = attrs.field(
        factory=lambda: ThreadPoolExecutor(THREADS, "mlxcel-body"), repr=False
    )
    _tool_format: asyncio.Future[ToolFormat] | None = None

    @property
    def context_size(self) -> int | None:
        """Tokens of a prompt and its answer together, if anything limits them."""
        return self.options.context_size or self.backend.context_size

    async def work(self, size: int, function: Callable[[], T], *, hard: bool = False) -> T:
        """``function()``, in a thread if the body it works on has many bytes.

        What is ``hard`` takes long however small the body is: a schema of a few patterns does.

        Raises:
            Unavailable: The server has ended.
        """
        small = size <= SMALL_BODY and not hard
        return function() if small else await _outcome(self._in_thread(function))

    def look_for_tools(self) -> None:
        """Begin to find out how the model writes calls of tools, in a thread."""
        self._tool_format = self._in_thread(partial(find_tool_format, self.backend.tokenizer))

    async def tool_format(self) -> ToolFormat:
        """How the model writes calls of tools.

        Raises:
            Unavailable: The server has ended.
        """
        assert self._tool_format is not None, "look_for_tools() comes first"
        return await _outcome(self._tool_format)

    def _in_thread(self, function: Callable[[], T]) -> asyncio.Future[T]:
        try:
            return asyncio.get_running_loop().run_in_executor(self.threads, function)
        except RuntimeError as error:
            raise Unavailable(ENDING) from error

    @contextmanager
    def submitted(self, requests: Sequence[Request], hear: Hear) -> Iterator[Stream]:
        """Run all of ``requests``, or none, and hear their outputs.

        Their numbers are given here. What has not finished at the end is cancelled.

        Raises:
            MlxcelError: The engine does not take them.
        """
        with self.dispatcher.open(len(requests), hear) as stream:
            numbered = zip(stream.numbers, requests, strict=True)
            self.backend.submit_all([attrs.evolve(each, index=number) for number, each in numbered])
            try:
                yield stream
            finally:
                for number in stream.open:
                    self.backend.cancel(number)

    async def stop(self, drain: float) -> None:
        """End the backend; running requests get ``drain`` seconds. Again is harmless."""
        await asyncio.to_thread(self.backend.stop, drain=drain)
        self.threads.shutdown(wait=False, cancel_futures=True)


async def _outcome(work: asyncio.Future[T]) -> T:
    """What ``work`` comes to; it goes on where whoever waits for it is cancelled.

    Raises:
        Unavailable: It was still queued when the server ended.
    """
    await asyncio.wait([work])
    if work.cancelled():
        raise Unavailable(ENDING)
    return work.result()


SERVING = web.AppKey("serving", Serving)
