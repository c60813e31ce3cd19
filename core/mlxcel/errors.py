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
class CheckpointMismatch(MlxcelError):
    """None of a peer's checkpoints is the coordinator's.

    ``folder`` holds the closest one, ``differences`` say what is not the same there, and
    ``others`` is the number of further checkpoints.
    """

    folder: Path
    differences: tuple[str, ...]
    others: int

    def __str__(self) -> str:
        shown = "; ".join(self.differences[:3])
        more = f"; and {len(self.differences) - 3} more" if len(self.differences) > 3 else ""
        closest = f" (the closest of {self.others + 1} checkpoints)" if self.others else ""
        return (
            f"{self.folder}{closest} is not the coordinator's checkpoint: {shown}{more}. "
            f"Copy the coordinator's folder to this peer, or name the right one with -m."
        )


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
class GrammarError(UsageError):
    """A JSON schema that no grammar can be made of; ``problem`` says why."""


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

    def __str__(self) -> str:
        return (
            f"stage {self.stage} (process {self.pid}) has given no sign of life for "
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
class DialError(MlxcelError):
    """A node that could not be reached or would not talk; ``address`` is where it was sought."""

    address: str
    problem: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.address}: {self.problem} {self.way_out}"


class Unreachable(DialError):
    """Nothing answers at the address."""


class NotANode(DialError):
    """Something listens at the address, but it does not speak the cluster's protocol."""


class SecretMismatch(DialError):
    """The other node's secret is not this one's."""


class PeerFull(DialError):
    """The other node knows this one, and has no room for another connection."""


class PeerRefused(DialError):
    """The other node knows this one and refuses it; ``problem`` holds its reason."""


@attrs.define(eq=False)
class VersionMismatch(DialError):
    """The other node speaks another version of the protocol."""

    ours: int
    theirs: int


@attrs.define(eq=False)
class ListenError(MlxcelError):
    """An address that this node cannot listen on for the other nodes."""

    address: str
    cause: str

    def __str__(self) -> str:
        return (
            f"this node cannot listen on {self.address}: {self.cause}. Choose another address "
            f"with --cluster-control-addr, or stop what uses it."
        )


@attrs.define(eq=False)
class FileError(MlxcelError):
    """A file that cannot be written; ``path`` says which."""

    path: Path
    problem: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.path} {self.problem} {self.way_out}"


@attrs.define(eq=False)
class SecretError(MlxcelError):
    """There is no secret that the cluster could use.

    ``source`` is the flag, variable or key that names it, empty if none does.
    """

    exit_code: ClassVar[int] = 2

    source: str
    problem: str

    def __str__(self) -> str:
        return (
            f"The cluster's secret{f' of {self.source}' * bool(self.source)} cannot be used: "
            f"{self.problem} `mlxcel cluster secret PATH` makes one; copy the file to all nodes "
            f"and name it with --cluster-secret-file."
        )


@attrs.define(eq=False)
class TopologyError(UsageError):
    """A cluster that cannot be; ``source`` is its TOML file, or the flags that describe it."""

    source: str

    def __str__(self) -> str:
        return f"{self.source}: {self.problem} {self.way_out}"


@attrs.frozen
class PeerFailure:
    """What went wrong with one peer of a cluster; ``text`` says what to do about it."""

    node: str
    address: str
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.node} @ {self.address} ({self.reason}): {self.text}"


@attrs.define(eq=False)
class BringUpError(MlxcelError):
    """A cluster that did not come up; nothing was started on any of its peers.

    ``phase`` is what was being done: connect, check, offer, commit or activate.
    """

    phase: str
    failures: tuple[PeerFailure, ...]

    def __str__(self) -> str:
        said = "; ".join(str(failure).rstrip(" .") for failure in self.failures)
        said = said or "it was interrupted"
        return f"the cluster did not come up ({self.phase}), nothing was started. {said}."


@attrs.define(eq=False)
class PeerLost(MlxcelError):
    """A node of a running cluster is gone; what was running is lost and may be tried again.

    ``node`` is its name in the cluster, ``address`` where its peer was; ``what`` says how.
    """

    node: str
    address: str
    what: str

    def __str__(self) -> str:
        return (
            f"{self.node} @ {self.address} is lost: {self.what.rstrip('.')}. What was running is "
            f"lost with it; see to that node, then start the coordinator again."
        )


@attrs.define(eq=False)
class PortTaken(MlxcelError):
    """A port that the cluster needs and that something else has; ``where`` is which."""

    where: str
    cause: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.where} cannot be used: {self.cause}. {self.way_out}"


@attrs.define(eq=False)
class DiscoveryError(MlxcelError):
    """Too few peers announced themselves.

    ``found`` are the addresses of those that did; ``hints`` what else was heard.
    """

    wanted: int
    found: tuple[str, ...]
    seconds: float
    port: int
    hints: tuple[str, ...] = ()

    def __str__(self) -> str:
        heard = f" ({', '.join(self.found)})" if self.found else ""
        hints = f"{'; '.join(self.hints)}. " if self.hints else ""
        return (
            f"{len(self.found)} of {self.wanted} peers{heard} announced themselves on UDP port "
            f"{self.port} within {self.seconds:g} s. {hints}Start the others with --pp-peer "
            f"--cluster-discovery mdns, this --cluster-name and this secret. Beacons stay within "
            f"their subnet, and firewalls must let this UDP port in: elsewhere give the peers "
            f"--cluster-discovery-target with this machine's address, or list them with "
            f"--cluster-peers."
        )


@attrs.define(eq=False)
class ClusterVersionError(MlxcelError):
    """Nodes that run another version; ``nodes`` are their addresses and versions."""

    nodes: tuple[tuple[str, str], ...]
    ours: str

    def __str__(self) -> str:
        theirs = "; ".join(f"{address} runs {version}" for address, version in self.nodes)
        return f"{theirs}; here it is {self.ours}. All nodes must be upgraded together."


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
