"""What the handlers of one app share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
from aiohttp import web

from mlxcel.engine.slot import Request
from mlxcel.observe.metrics import ServerMetrics
from mlxcel.server.backend import Backend
from mlxcel.server.dispatch import Dispatcher, Stream
from mlxcel.server.event_stream import hang_up
from mlxcel.server.options import Options
from mlxcel.server.schema import Generation


@attrs.frozen(eq=False)
class Serving:
    """One app's settings, backend and figures.

    Attributes:
        ended: Set when the backend has failed.
    """

    options: Options
    backend: Backend
    dispatcher: Dispatcher
    metrics: ServerMetrics
    ended: asyncio.Event = attrs.field(factory=asyncio.Event)

    @property
    def context_size(self) -> int | None:
        """Tokens of a prompt and its answer together, if anything limits them."""
        return self.options.context_size or self.backend.context_size

    @contextmanager
    def submitted(
        self, request: web.Request, prompt: Sequence[int], generation: Generation
    ) -> Iterator[Stream]:
        """Run a prompt and hear its outputs; what has not finished at the end is cancelled.

        Raises:
            MlxcelError: The engine does not take it.
        """
        with self.dispatcher.open(on_overflow=lambda: hang_up(request)) as stream:
            self.backend.submit(
                Request(
                    stream.index,
                    tuple(prompt),
                    generation.max_tokens,
                    generation.sampling,
                    generation.stop,
                    generation.ignore_eos,
                )
            )
            self.metrics.prompt_tokens.inc(len(prompt))
            try:
                yield stream
            finally:
                if not stream.finished:
                    self.backend.cancel(stream.index)

    async def stop(self, drain: float) -> None:
        """End the backend; running requests get ``drain`` seconds. Again is harmless."""
        await asyncio.to_thread(self.backend.stop, drain=drain)


SERVING = web.AppKey("serving", Serving)
