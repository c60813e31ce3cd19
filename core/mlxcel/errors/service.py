"""What can go wrong between clients and a server, on either side."""

from __future__ import annotations

from typing import ClassVar

import attrs

from mlxcel.errors.base import MlxcelError


@attrs.define(eq=False)
class AddressError(MlxcelError):
    """An address that the server cannot listen on."""

    host: str
    port: int
    cause: str

    def __str__(self) -> str:
        return (
            f"the server cannot listen on {self.host}, port {self.port}: {self.cause}. "
            f"Choose another with --port or --host, or stop what uses it."
        )


@attrs.define(eq=False)
class ServerUnreachable(MlxcelError):
    """A server that a client cannot connect to."""

    url: str
    cause: str

    def __str__(self) -> str:
        return f"{self.url} cannot be reached: {self.cause}. Start the server, or correct the URL."


@attrs.define(eq=False)
class ServerRefusal(MlxcelError):
    """What a server answered instead of doing what it was asked; ``problem`` in its own words.

    ``status`` is that of HTTP, or None where an answer had begun already. ``retry_after`` are
    the seconds after which it wants to be asked again.
    """

    url: str
    status: int | None
    problem: str
    code: str | None = None
    retry_after: float | None = None

    def __str__(self) -> str:
        told = f"status {self.status}" if self.status else "an error amid the answer"
        problem = self.problem if self.problem.endswith((".", "!", "?")) else f"{self.problem}."
        return f"{self.url} answered with {told}: {problem} {self._way_out()}".rstrip()

    def _way_out(self) -> str:
        if self.status in (401, 403):
            return "Give the right key with --api-key."
        if "try again" in self.problem.lower():
            return ""
        if self.retry_after is not None:
            return f"Try again in {self.retry_after:g} s."
        return "Try again later." if self.status in (429, 503) else ""


@attrs.define(eq=False)
class ServerAnswerError(MlxcelError):
    """An answer that breaks off, or is not what the API says it is."""

    url: str
    problem: str

    def __str__(self) -> str:
        return f"{self.url}: {self.problem}. Its own log may say why."


@attrs.define(eq=False)
class InternalError(MlxcelError):
    """A bug: ``what`` met an error that nobody foresaw; ``cause`` is its type and text."""

    what: str
    cause: str

    def __str__(self) -> str:
        return f"{self.what} failed: {self.cause}. This is a bug in mlxcel; please report it."


@attrs.define(eq=False)
class QueueFull(MlxcelError):
    """More requests would wait than the operator allows; try again later."""

    waiting: int
    asked: int = 1

    def __str__(self) -> str:
        return (
            f"{self.waiting} requests are waiting already, and {self.asked} more would be too "
            f"many. Try again later."
        )


@attrs.define(eq=False)
class TooManyAtOnce(MlxcelError):
    """More answers to one request than even an idle engine would take."""

    exit_code: ClassVar[int] = 2

    asked: int
    queue_depth: int
    parallel: int

    def __str__(self) -> str:
        return (
            f"The request asks for {self.asked} answers at once; {self.parallel} run at once "
            f"(--parallel), and no more than {self.queue_depth} may wait (--max-queue-depth). "
            f"Ask for fewer."
        )


@attrs.define(eq=False)
class NeverFits(MlxcelError):
    """A request that not even an idle pipeline could hold."""

    exit_code: ClassVar[int] = 2

    diagnostic: str

    def __str__(self) -> str:
        return (
            f"The request needs more cache memory than a stage has: {self.diagnostic}. "
            f"Ask for fewer tokens or a shorter prompt."
        )


@attrs.define(eq=False)
class Unavailable(MlxcelError):
    """The engine cannot take or finish the request now; a retry after a while may work."""

    reason: str
    retry_after: float = 1.0

    def __str__(self) -> str:
        return f"{self.reason} Try again in {self.retry_after:g} s."
