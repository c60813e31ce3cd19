"""The armed worker of a peer, as the supervisor's event loop sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from mlxcel.errors import DeadlineError, WireError, WorkerNotStarted, WorkerStartError
from mlxcel.pipeline.control import (
    MAX_CONTROL,
    Alive,
    Control,
    DataSocket,
    Job,
    decode_control,
    send_control,
    send_socket,
)
from mlxcel.pipeline.launch import how_it_ended, interrupts_held, worker_command
from mlxcel.pipeline.report import Beat, Ended, Failed, Hello, Loaded, Loading

FromStage = Loading | Loaded | Failed | Ended | Beat

HANGING_SECONDS = 5.0
"""How long a worker may go on after its control socket has closed."""

_LENGTH = struct.Struct("<Q")


class WorkerProcess:
    """One worker process from its start to its end. Make one with :meth:`start`.

    When the supervisor is gone, its end of the control socket closes, and the worker ends.

    Attributes:
        pid: Its number.
        hello: What it said of itself, once it has.
        how: Its exit status in words, once it has ended.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        control: socket.socket,
        on_report: Callable[[FromStage], None],
        on_end: Callable[[], None],
    ) -> None:
        self.pid = process.pid
        self.hello: Hello | None = None
        self.how: str | None = None
        self._process = process
        self._control = control
        self._on_report = on_report
        self._on_end = on_end
        self._heard = time.monotonic()
        self._said_hello = asyncio.Event()
        self._life = asyncio.get_running_loop().create_task(self._live())

    @classmethod
    async def start(
        cls,
        *,
        environment: Mapping[str, str],
        without: Sequence[str],
        on_report: Callable[[FromStage], None],
        on_end: Callable[[], None],
    ) -> WorkerProcess:
        """Start a worker, which begins to import what it will need.

        Args:
            environment: What it has in its environment beyond this process's.
            without: Plugins that the user left out.
            on_report: Called with what the stage says.
            on_end: Called once when the process has ended, whoever ended it.

        Raises:
            WorkerNotStarted: The system has no room for another process.
        """
        with contextlib.ExitStack() as stack:
            try:
                here, there = map(stack.enter_context, socket.socketpair())
                with interrupts_held():
                    process = await asyncio.create_subprocess_exec(
                        *worker_command(there.fileno(), without),
                        pass_fds=[there.fileno()],
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=2,  # what a library prints must not end up in ours
                        env={**os.environ, **environment},
                    )
            except OSError as error:  # such as too many processes or open files
                raise WorkerNotStarted(error.strerror or str(error)) from error
            stack.pop_all()
        there.close()
        return cls(process, here, on_report, on_end)

    @property
    def silent(self) -> float:
        """Seconds since its last sign of life."""
        return time.monotonic() - self._heard

    async def armed(self, timeout: float) -> Hello:
        """What the worker says of itself, when it is ready for a job.

        Raises:
            WorkerStartError: It has ended instead.
            DeadlineError: It is not ready in time.
        """
        try:
            await asyncio.wait_for(self._said_hello.wait(), timeout)
        except TimeoutError:
            raise DeadlineError(
                f"the worker (process {self.pid})",
                "its imports",
                timeout,
                "Look for what slows this machine down, then start the peer again.",
            ) from None
        if self.hello is None:
            raise WorkerStartError(self.pid, self.how or "it closed its connection")
        return self.hello

    def give(self, job: Job, sockets: Iterable[tuple[DataSocket, socket.socket]]) -> None:
        """Hand over the job and the sockets of its links; ``sockets`` are closed here.

        Raises:
            WorkerStartError: The worker is gone.
        """
        given = list(sockets)
        try:
            # A few kilobytes into an empty buffer: this never waits.
            send_control(self._control, job)
            for data, sock in given:
                send_socket(self._control, data, sock)
        except OSError as error:
            raise WorkerStartError(self.pid, self.how or str(error)) from error
        finally:
            for _, sock in given:
                sock.close()

    async def end(self, grace: float) -> None:
        """End the process: it has ``grace`` seconds for that, then it is killed."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        done, _ = await asyncio.wait([self._life], timeout=grace)
        if not done:
            self.kill()
            await asyncio.wait([self._life])

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _live(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, WireError):
            await self._listen()
        try:
            code = await asyncio.wait_for(self._process.wait(), HANGING_SECONDS)
        except TimeoutError:  # it has hung up on us and goes on
            self.kill()
            code = await self._process.wait()
        self.how = how_it_ended(code)
        self._control.close()
        self._said_hello.set()
        self._on_end()

    async def _listen(self) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=self._control)
        try:
            while True:
                self._take(await _next(reader))
        finally:
            writer.transport.abort()

    def _take(self, message: Control) -> None:
        self._heard = time.monotonic()
        match message:
            case Hello():
                self.hello = message
                self._said_hello.set()
            case Alive() | Job() | DataSocket():
                pass
            case _:
                self._on_report(message)


async def _next(reader: asyncio.StreamReader) -> Control:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_CONTROL:
        raise WireError(f"a control message of {length} bytes; {MAX_CONTROL} are allowed")
    return decode_control(await reader.readexactly(length))
