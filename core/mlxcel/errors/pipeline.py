"""What can go wrong between the stages of a pipeline."""

from __future__ import annotations

import attrs

from mlxcel.errors.base import MlxcelError


@attrs.define(eq=False)
class WireError(MlxcelError):
    """Bytes from a peer that are not what the format allows; the connection must close."""

    what: str

    def __str__(self) -> str:
        return f"malformed wire data: {self.what}"


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
class StageError(MlxcelError):
    """A stage that failed; ``cause`` is the error's type and text as the stage saw it."""

    stage: int
    operation: str
    cause: str

    @property
    def problem(self) -> str:
        """What happened, without what to do about it."""
        return f"stage {self.stage} failed during {self.operation}: {self.cause}."

    def __str__(self) -> str:
        return (
            f"{self.problem} `mlxcel generate` with --pp-size 1 shows whether the model itself "
            f"fails."
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
class GrammarFailed(MlxcelError):
    """A text that cannot go on within its grammar; the other texts of its batch can."""

    cause: str

    def __str__(self) -> str:
        return (
            f"the text cannot go on within its grammar: {self.cause}. "
            f"Use a simpler schema, or none."
        )


@attrs.define(eq=False)
class RankLost(MlxcelError):
    """A rank of a stage that did not take part in what all ranks do together.

    ``operation`` is what was to be done, ``how`` why it failed. The group is over. ``broken`` says
    that who tells this saw the connection with that rank end; else it was late, or others told.
    """

    stage: int
    rank: int
    operation: str
    how: str
    broken: bool = False

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of stage {self.stage} is lost in {self.operation}: {self.how}. "
            f"Look at its log; if it was only slow, give it more time with --tp-timeout."
        )


@attrs.define(eq=False)
class RankLinkBroken(MlxcelError):
    """The connection between two ranks of a stage that broke, while both live."""

    stage: int
    rank: int
    other: int
    how: str

    def __str__(self) -> str:
        return (
            f"the connection between rank {self.rank} and rank {self.other} of stage {self.stage} "
            f"broke: {self.how}. Both live. What was running is lost; look at the network between "
            f"them (cables, firewalls, limits for idle connections), then start again."
        )


@attrs.define(eq=False)
class RanksDisagree(MlxcelError):
    """A rank whose own link brings something else than what rank 0 has announced."""

    stage: int
    rank: int
    announced: str
    found: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of stage {self.stage} was to run {self.announced}, but its link "
            f"brought {self.found}. This is a bug in mlxcel; please report it."
        )


@attrs.define(eq=False)
class SamplingFailed(MlxcelError):
    """Tokens that could not be drawn from logits that all ranks have made; ``cause`` says why."""

    cause: str

    def __str__(self) -> str:
        return f"no tokens can be drawn: {self.cause}. The stage itself goes on."


@attrs.define(eq=False)
class WorkerFailed(MlxcelError):
    """A stage's process ended by an error; ``kind`` and ``text`` are the error as it was there.

    ``rank`` is the process's in its stage; None where it was all of the stage. ``lost`` are the
    stage and the rank of another one that it missed, if that is the error, and ``broken`` is how
    it saw the connection with that one end, if it did.
    """

    stage: int
    kind: str
    text: str
    exit_code: int = 1  # type: ignore[misc]  # as the error itself would have returned
    rank: int | None = None
    lost: tuple[int, int] | None = None
    broken: str = ""

    def __str__(self) -> str:
        return f"{_title(self.stage, self.rank)}: {self.text}"


@attrs.define(eq=False)
class WorkerDied(MlxcelError):
    """A stage's process is gone without a word; ``how`` says by which signal or exit code."""

    stage: int
    pid: int
    how: str
    rank: int | None = None

    def __str__(self) -> str:
        return (
            f"{_title(self.stage, self.rank)} (process {self.pid}) died: {self.how}. "
            f"What was running is lost; start the command again. "
            f"If it was killed for want of memory, use more stages."
        )


@attrs.define(eq=False)
class PeerWorkerDied(MlxcelError):
    """A peer's worker is gone without a word, as its supervisor says; it starts another."""

    pid: int
    how: str

    def __str__(self) -> str:
        return (
            f"its worker process {self.pid} died: {self.how}. "
            f"If it was killed for want of memory, use more stages."
        )


@attrs.define(eq=False)
class WorkerSilent(MlxcelError):
    """A stage's process that exists and gives no sign of life; ``seconds`` is for how long."""

    stage: int
    pid: int
    seconds: float
    rank: int | None = None

    def __str__(self) -> str:
        return (
            f"{_title(self.stage, self.rank)} (process {self.pid}) has given no sign of life for "
            f"{self.seconds:g} s: it is stopped, or this machine is overloaded. What was running "
            f"is lost; start the command again."
        )


@attrs.define(eq=False)
class WorkerStartError(MlxcelError):
    """A peer's worker process that ended before it had a stage; ``how`` says how."""

    pid: int
    how: str

    def __str__(self) -> str:
        return (
            f"the worker (process {self.pid}) that this peer keeps ready has ended: {self.how}. "
            f"What it wrote to standard error says why."
        )


@attrs.define(eq=False)
class WorkerNotStarted(MlxcelError):
    """A peer's worker process that the system would not start; ``cause`` says why."""

    cause: str

    def __str__(self) -> str:
        return (
            f"no worker process can be started: {self.cause}. Look at this machine's limits "
            f"(ulimit -a) and its free memory."
        )


@attrs.define(eq=False)
class WorkerNotReady(MlxcelError):
    """A peer that has no worker process ready for a stage, after so many ``seconds``.

    ``cause`` says why the last one did not come up; it is empty where one is still being started.
    """

    seconds: float
    cause: str

    def __str__(self) -> str:
        why = self.cause or "it is still being started. Try again in a moment."
        return f"no worker process has been ready within {self.seconds:g} s: {why}"


@attrs.define(eq=False)
class WorkerMismatch(MlxcelError):
    """Two stages' processes that do not run the same software; ``what`` names the difference."""

    stage: int
    what: str
    here: str
    there: str
    rank: int | None = None

    def __str__(self) -> str:
        return (
            f"{_title(self.stage, self.rank)} runs with {self.what} {self.there}, "
            f"the others with {self.here}. "
            f"Start all of them from one environment."
        )


def _title(stage: int, rank: int | None) -> str:
    """What errors call a worker."""
    return f"stage {stage}" if rank is None else f"rank {rank} of stage {stage}"
