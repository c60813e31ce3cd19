"""A model of this machine, served within this process to nobody else."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlxcel.cli.progress import LoadingBars
from mlxcel.errors import DeadlineError

if TYPE_CHECKING:
    from aiohttp import web

    from mlxcel.server.backend import Backend, MakeBackend

LOOK_SECONDS = 0.05
START_SECONDS, END_SECONDS = 60.0, 60.0


@contextmanager
def local_server(make_backend: MakeBackend, name: str) -> Iterator[tuple[str, str]]:
    """The URL of a server on a free port, once the model is loaded, and the key that it wants.

    Raises:
        MlxcelError: The model could not be loaded.
    """
    from mlxcel.server import Options, create_app
    from mlxcel.server.serving import SERVING

    key = secrets.token_urlsafe(32)
    app = create_app(make_backend, Options(name, api_keys=(key,), drain_timeout=0.0))
    with _in_background(app) as url:
        _wait(app[SERVING].backend)
        yield url, key


def _wait(backend: Backend) -> None:
    """Until the model is loaded; bars show how far it is."""
    bars = LoadingBars()
    try:
        while backend.phase == "loading":
            for stage in backend.stages:
                if stage.bytes_total:
                    bars(stage.stage, stage.bytes_done, stage.bytes_total)
            time.sleep(LOOK_SECONDS)
    finally:
        bars.close()
    if backend.error is not None:
        raise backend.error


@contextmanager
def _in_background(app: web.Application) -> Iterator[str]:
    """``app`` on a free port of this machine, run by a thread of its own; its URL."""
    from mlxcel.server.run import bind, make_runner
    from mlxcel.server.site import Site, url_of

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="mlxcel-server", daemon=True)
    thread.start()
    runner = make_runner(app)

    with bind("127.0.0.1", 0) as sock:

        async def start() -> None:
            await runner.setup()
            await Site(runner, sock).start()

        try:
            _within(START_SECONDS, loop, start(), "its start")
            yield url_of(sock)
        finally:
            _within(END_SECONDS, loop, runner.cleanup(), "its end")
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def _within(
    seconds: float, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None], what: str
) -> None:
    """Have ``loop``, which another thread runs, do ``work``.

    Raises:
        DeadlineError: It takes longer than ``seconds``.
    """
    try:
        asyncio.run_coroutine_threadsafe(work, loop).result(seconds)
    except TimeoutError as error:
        way_out = "This machine may be too busy; try again when it is less so."
        raise DeadlineError("The server in this process", what, seconds, way_out) from error
