"""What can be wrong with a checkpoint, a plan, a plugin or a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import attrs

from mlxcel.errors.base import MlxcelError, UsageError
from mlxcel.errors.words import named_layers, verb


@attrs.define(eq=False)
class PartitionError(UsageError):
    """A set of layer ranges that cannot be: gaps, overlaps, too many stages, a cut group."""


@attrs.define(eq=False)
class TensorParallelError(MlxcelError):
    """A number of ranks that cannot share a model.

    Attributes:
        size: The ranks of a stage that were asked for.
        parts: What they cannot share, such as "9 query heads".
        module: Where that is.
        legal: The numbers of ranks that can.
        otherwise: Flags that allow further ones, each with those.
    """

    exit_code: ClassVar[int] = 2

    size: int
    parts: str
    module: str
    legal: tuple[int, ...]
    otherwise: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        also = "".join(f" With {flag} also {_listed(sizes)}." for flag, sizes in self.otherwise)
        stages = " Use pipeline stages instead (--pp-size)." * (self.legal == (1,) and not also)
        return (
            f"--tp-size {self.size} cannot share the {self.parts} of {self.module}. "
            f"Legal sizes: {_listed(self.legal)}.{also}{stages}"
        )


def _listed(numbers: tuple[int, ...]) -> str:
    """Runs of more than three numbers as their ends: 1, 2, 4-7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs
    )


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
class GrammarError(UsageError):
    """A JSON schema that no grammar can be made of; ``problem`` says why."""


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
        room: Where there is more, in a sentence.
        way_out: What would help, in a sentence; empty if nobody has looked, or nothing would.
    """

    stage: int
    device: str
    layers: str
    needed_bytes: int
    kv_bytes: int
    budget_bytes: int
    best: bool
    room: str
    way_out: str = ""

    @property
    def short_bytes(self) -> int:
        """How many bytes the stage lacks."""
        return self.needed_bytes - self.budget_bytes

    def __str__(self) -> str:
        caches = f" ({self.kv_bytes} of them for KV caches)" if self.kv_bytes else ""
        return (
            f"{'No division of the layers fits the memory; in the best one ' * self.best}"
            f"stage {self.stage} ({self.device}) is {self.short_bytes} bytes short: "
            f"{named_layers(self.layers)} {verb(self.layers, 'needs', 'need')} "
            f"{self.needed_bytes} bytes{caches}, and there is room for "
            f"{self.budget_bytes}. {self.room} {self.way_out}".rstrip()
        )
