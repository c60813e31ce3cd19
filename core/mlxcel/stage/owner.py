"""A worker's side of the socket to the process that owns it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from mlxcel.errors import WireError
from mlxcel.pipeline.control import (
    Alive,
    DataSocket,
    FromWorker,
    Job,
    receive_control,
    receive_socket,
    send_control,
)
from mlxcel.pipeline.sockets import SocketKey, sockets_of

ALIVE_SECONDS = 0.5
"""Between two signs of life."""

LAST_STEP_SECONDS = 2.0
"""How long the running step may still take once the owner is gone."""

Given = tuple[DataSocket, socket.socket]
"""A socket and what it is."""


class Owner:
    """The engine or the supervisor, as its worker sees it.

    From the beginning one thread says that this process runs, and one listens; when the owner's
    end of the socket closes, that one ends this process.

    Args:
        sock: Connected to the owner.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._heard: SimpleQueue[Job | Given] = SimpleQueue()
        self._endings: tuple[Callable[[str], None], ...] = ()
        for target in (self._say_alive, self._listen):
            threading.Thread(target=target, name="mlxcel-owner", daemon=True).start()

    def say(self, message: FromWorker) -> None:
        """Tell the owner, in any thread."""
        with self._lock, contextlib.suppress(OSError):  # who is gone: the listener ends us
            send_control(self._sock, message)

    def work(self) -> tuple[Job, dict[SocketKey, Given]]:
        """The job, and the sockets that its spec needs, once all are there."""
        job: Job | None = None
        sockets: dict[SocketKey, Given] = {}
        while job is None or sockets.keys() < sockets_of(job.spec):
            match self._heard.get():
                case Job() as job:
                    pass
                case (DataSocket() as data, _) as given:
                    sockets[data.direction, data.rank] = given
        return job, sockets

    def at_the_end(self, *endings: Callable[[str], None]) -> None:
        """Call ``endings`` with the reason when the owner is gone; a moment later all is over."""
        self._endings = endings

    def _say_alive(self) -> None:
        while True:
            self.say(Alive())
            time.sleep(ALIVE_SECONDS)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, WireError):
            while (message := receive_control(self._sock)) is not None:
                if isinstance(message, DataSocket):
                    self._heard.put((message, receive_socket(self._sock)))
                elif isinstance(message, Job):
                    self._heard.put(message)
        for end in self._endings:
            end("the engine is gone")
        if self._endings:
            # The stage finds its links closed after its step; if that is long, go without it.
            time.sleep(LAST_STEP_SECONDS)
        os._exit(1)
