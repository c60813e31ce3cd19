"""Every error mlxcel raises on purpose.

Each class carries the facts as fields, and its text says what happened and what
to do next. ``exit_code`` is what the command line returns: 1 for a failure or a
bad state, 2 for a request that can never work (flags, impossible shapes).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import attrs


class MlxcelError(Exception):
    """Base of all errors that mlxcel raises on purpose."""

    exit_code: ClassVar[int] = 1


@attrs.define(eq=False)
class UsageError(MlxcelError):
    """The request can never work: flags that exclude each other, an impossible shape."""

    exit_code: ClassVar[int] = 2

    problem: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.problem} {self.way_out}"


@attrs.define(eq=False)
class PartitionError(UsageError):
    """A set of layer ranges that cannot be: gaps, overlaps, too many stages, a cut group."""


@attrs.define(eq=False)
class CheckpointError(MlxcelError):
    """A checkpoint that cannot be read; ``path`` is the file or folder at fault."""

    path: Path
    problem: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem} {self.way_out}"


@attrs.define(eq=False)
class ChatTemplateError(MlxcelError):
    """A chat template that cannot be compiled or rendered; ``path`` is the file it came from."""

    path: Path
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path}: the chat template does not work: {self.problem} "
            f"Correct the template, or send the prompt as it is (--no-chat-template)."
        )


@attrs.define(eq=False)
class ChatTemplateRefusal(ChatTemplateError):
    """Messages that the template itself refuses; ``problem`` is the template's own text."""

    exit_code: ClassVar[int] = 2

    def __str__(self) -> str:
        return f"the model's chat template refuses these messages: {self.problem}"


@attrs.define(eq=False)
class UnsupportedError(MlxcelError):
    """Something mlxcel knows but cannot do here; the text names the way out."""

    exit_code: ClassVar[int] = 2

    problem: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.problem} {self.way_out}"


@attrs.define(eq=False)
class PluginError(MlxcelError):
    """A plugin that cannot be used; only whoever asks for it by name sees this."""

    kind: str
    name: str
    distribution: str
    reason: str

    def __str__(self) -> str:
        owner = f" of {self.distribution}" if self.distribution else ""
        return (
            f"{self.kind} plugin {self.name!r}{owner} cannot be used: {self.reason} "
            f"`mlxcel plugins` lists what is installed and why a plugin failed."
        )


@attrs.define(eq=False)
class WireError(MlxcelError):
    """Bytes from a peer that are not what the format allows; the connection must close."""

    what: str

    def __str__(self) -> str:
        return f"malformed wire data: {self.what}"


@attrs.define(eq=False)
class DeadlineError(MlxcelError):
    """A wait that ended without an answer."""

    peer: str
    operation: str
    seconds: float
    way_out: str

    def __str__(self) -> str:
        return (
            f"{self.peer} did not answer within {self.seconds:g} s while waiting for "
            f"{self.operation}. {self.way_out}"
        )


@attrs.define(eq=False)
class StageError(MlxcelError):
    """A stage that failed; ``cause`` is the error's type and text as the stage saw it."""

    stage: int
    operation: str
    cause: str

    def __str__(self) -> str:
        return (
            f"stage {self.stage} failed during {self.operation}: {self.cause}. "
            f"Run it with --pp-size 1 to see whether the model itself fails."
        )


@attrs.define(eq=False)
class LogitsError(MlxcelError):
    """Logits that are not numbers, so that no token can be taken."""

    def __str__(self) -> str:
        return (
            "the model's logits are not numbers (NaN). Try --dtype float32; if that does not help, "
            "config.json or the weights are damaged."
        )


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
class QueueFull(MlxcelError):
    """More requests wait than the operator allows; try again later."""

    depth: int

    def __str__(self) -> str:
        return f"{self.depth} requests are waiting already. Try again later."


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


@attrs.define(eq=False)
class ChannelClosed(MlxcelError):
    """A channel whose other end is gone; ``reason`` is what the closer said, if anything."""

    name: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.name} is closed" + (f": {self.reason}" if self.reason else ".")


@attrs.define(eq=False)
class ChannelFull(MlxcelError):
    """A put into a full channel: more steps in flight than credits, which is a bug."""

    name: str
    capacity: int

    def __str__(self) -> str:
        return (
            f"{self.name} already holds its {self.capacity} messages: more steps are in flight "
            f"than there are credits. This is a bug in mlxcel; please report it."
        )


@attrs.define(eq=False)
class WorkerFailed(MlxcelError):
    """A stage's process ended by an error; ``kind`` and ``text`` are the error as it was there."""

    stage: int
    kind: str
    text: str
    exit_code: int = 1  # type: ignore[misc]  # as the error itself would have returned

    def __str__(self) -> str:
        return f"stage {self.stage}: {self.text}"


@attrs.define(eq=False)
class WorkerDied(MlxcelError):
    """A stage's process is gone without a word; ``how`` says by which signal or exit code."""

    stage: int
    pid: int
    how: str

    def __str__(self) -> str:
        return (
            f"stage {self.stage} (process {self.pid}) died: {self.how}. What was running is lost; "
            f"start the command again. If it was killed for want of memory, use more stages."
        )


@attrs.define(eq=False)
class WorkerMismatch(MlxcelError):
    """Two stages' processes that do not run the same software; ``what`` names the difference."""

    stage: int
    what: str
    here: str
    there: str

    def __str__(self) -> str:
        return (
            f"stage {self.stage} runs with {self.what} {self.there}, the others with {self.here}. "
            f"Start all of them from one environment."
        )


@attrs.define(eq=False)
class MemoryBudgetError(MlxcelError):
    """A plan that does not fit the memory.

    Attributes:
        stage: The stage that lacks the most memory.
        device: Where it would run.
        layers: Its layers, such as ``"10-19"``, both ends included.
        needed_bytes: What it would hold, weights and caches.
        kv_bytes: The caches' part of that.
        budget_bytes: What it may hold.
        best: Whether every other division of the layers lacks as much or more.
        way_out: What would help.
    """

    stage: int
    device: str
    layers: str
    needed_bytes: int
    kv_bytes: int
    budget_bytes: int
    best: bool
    way_out: str

    @property
    def short_bytes(self) -> int:
        """How many bytes the stage lacks."""
        return self.needed_bytes - self.budget_bytes

    def __str__(self) -> str:
        caches = f" ({self.kv_bytes} of them for KV caches)" if self.kv_bytes else ""
        return (
            f"{'No division of the layers fits the memory; in the best one ' * self.best}"
            f"stage {self.stage} ({self.device}) is {self.short_bytes} bytes short: layers "
            f"{self.layers} need {self.needed_bytes} bytes{caches}, and there is room for "
            f"{self.budget_bytes}. {self.way_out}"
        )
