"""Running the application until a signal or a failure ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from mlxcel.errors import AddressError
from mlxcel.server.serving import SERVING, Serving
from mlxcel.server.site import BACKLOG, Site

LAST_SECONDS = 5.0
"""How long the last answers may take to be written when everything has ended."""

IDLE_SECONDS = 75.0
"""How long a client may take to send the next request's head; longer than proxies keep a connection
that they do not use."""


def ending_signals() -> tuple[signal.Signals, ...]:
    """What asks a server to end: SIGTERM, Ctrl-C, and a terminal that is closed.

    Not the last where whoever started the process ignores it, as nohup does.
    """
    asked = (signal.SIGTERM, signal.SIGINT)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return asked if ignored else (*asked, signal.SIGHUP)


def bind(host: str, port: int, *, listen: bool = True) -> socket.socket:
    """A socket that listens on ``host`` and ``port``; port 0 takes a free one.

    Args:
        listen: Without it the port is taken, and whoever comes is turned away until :func:`serve`.

    Raises:
        AddressError: The port is in use, or the address is not one of this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if listen:
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Else Linux gives the port to others too, until one of them listens.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return sock
    except OSError as error:
        raise AddressError(host, port, error.strerror or str(error)) from error


def make_runner(app: web.Application, shutdown_timeout: float = LAST_SECONDS) -> web.AppRunner:
    """Runs ``app``; clients that do not speak HTTP get their answer and leave no log."""
    return web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=shutdown_timeout,
        logger=_http_log,
        auto_decompress=False,  # the handlers refuse what is compressed
        keepalive_timeout=IDLE_SECONDS,
    )


def _is_our_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


_http_log = logging.getLogger("mlxcel.server.http")
_http_log.addFilter(_is_our_fault)


async def serve(
    app: web.Application, sock: socket.socket, on_listening: Callable[[], None]
) -> None:
    """Serve until a signal, then let running requests finish; a second one ends at once.

    Raises:
        MlxcelError: The model could not be loaded, or a stage died.
    """
    serving = app[SERVING]
    runner = make_runner(app)
    stopping = asyncio.Event()
    await runner.setup()
    try:
        await Site(runner, sock).start()
        with _signals(serving, stopping):
            on_listening()
            await _first(stopping.wait(), serving.ended.wait())
            # The listener stays: who comes now is told to come back, and health says why.
            await serving.stop(serving.options.drain_timeout)
    finally:
        await runner.cleanup()
    if serving.backend.error is not None:
        raise serving.backend.error


@contextlib.contextmanager
def _signals(serving: Serving, stopping: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    hurried: list[asyncio.Task[None]] = []

    def hear() -> None:
        if stopping.is_set():
            hurried.append(loop.create_task(serving.stop(0)))
        stopping.set()

    numbers = ending_signals()
    for number in numbers:
        loop.add_signal_handler(number, hear)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Until one of ``waits`` is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
