"""Who gets a place, when, and from which remembered prompt they start.

Memory is reserved on all workers for a sequence's prompt and all its tokens before its first
step, or the sequence waits, and so do all behind it. Prompts that the stages remember hold
memory too, and make room for sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many

import attrs

from mlxcel.engine.kv_grid import (
    broadcast_2d_eviction,
    coordinated_admission_with_attribution,
    grid_of,
)
from mlxcel.engine.kv_manager import AdmissionDiagnostic, StageKVManager
from mlxcel.engine.limits import Limits
from mlxcel.engine.prefix_cache import Entry, PrefixCache
from mlxcel.engine.sequence import Sequence, State
from mlxcel.engine.slot import Start, Work, prompt_work
from mlxcel.pipeline.operations import Copy, Extract, Operation, Release

MOST_GRAMMAR = 1 << 20
"""Characters of all grammars in one step; its header has a bound."""


@attrs.define(eq=False)
class Slot:
    """A decoding batch: its rows, the jobs about to join it, and all that hold memory in it."""

    key: int
    handle: int | None = None
    merged: bool = False
    rows: list[Sequence] = attrs.field(factory=list)
    joins: list[Job] = attrs.field(factory=list)
    members: list[Sequence] = attrs.field(factory=list)
    busy: bool = False


@attrs.define(eq=False)
class Job:
    """Prompts under way to ``slot``: the rows of one batch and the steps still to send.

    ``source`` is the remembered prompt that its first step will copy, until that is sent.
    """

    handle: int
    slot: Slot
    rows: list[Sequence]
    work: deque[Work]
    source: int | None = None
    in_flight: int = 0

    @property
    def merged(self) -> bool:
        return len(self.rows) > 1


class Admission:
    """Sequences wait here until they are part of a job.

    Args:
        stages: The number of stages.
        slots: Where there are places, as many as stages or more.
        managers: The cache budget of each worker; none is unlimited.
        ends: The tokens that end a text.
        limits: What the operator allows.
        prefixes: Prompts that the stages remember.
        handles: Fresh handles of batches.
        on_refusal: Told a stage's refusal to admit, once a sequence, for metrics.

    Attributes:
        waiting: Who has no place yet, in the order of arrival.
        orphans: Operations that give back what nothing else will, still to be sent.
    """

    def __init__(
        self,
        stages: int,
        slots: Many[Slot],
        managers: Many[StageKVManager],
        ends: tuple[int, ...],
        limits: Limits,
        prefixes: PrefixCache,
        handles: Iterator[int],
        on_refusal: Callable[[AdmissionDiagnostic], None],
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.orphans: list[Operation] = []
        self._stages = stages
        self._slots = slots
        self._grid = grid_of(managers)
        self._ends = ends
        self._limits = limits
        self._prefixes = prefixes
        self._handles = handles
        self._on_refusal = on_refusal
        self._refused: Sequence | None = None

    @property
    def active(self) -> int:
        """Sequences that hold a place."""
        return sum(len(slot.members) for slot in self._slots)

    def impossible(self, sequence: Sequence) -> AdmissionDiagnostic | None:
        """The worker that could not hold ``sequence`` even if it were alone; None if all could."""
        refusals = (manager.impossible(sequence.longest) for manager in self._grid.values())
        return next((refusal for refusal in refusals if refusal is not None), None)

    def expire(self, before: float) -> list[Sequence]:
        """Take out the sequences that arrived ``before`` and still wait for a place."""
        late = []
        while self.waiting and self.waiting[0].arrived < before:  # they stand as they arrived
            late.append(self.waiting.popleft())
        return late

    def admit(self) -> list[Job]:
        """Give places to those who wait, in their order, as long as there are any."""
        jobs = []
        groups: dict[int, list[Sequence]] = {}
        while self.waiting and self.active < self._limits.parallel:
            slot = self._place()
            if slot is None or not self._reserve(slot, self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            sequence.state = State.PENDING_PREFILL
            slot.members.append(sequence)
            if (start := self._prefixes.find(sequence.request.prompt)) is not None:
                jobs.append(self._begin(slot, [sequence], start))
            else:
                groups.setdefault(slot.key, []).append(sequence)
        for key, group in groups.items():
            jobs += [self._begin(self._slots[key], rows) for rows in _packed(group, self._limits)]
        return jobs

    def leave(self, slot: Slot, gone: list[Sequence]) -> None:
        """Give back the memory of sequences whose rows leave with the step being made."""
        if not gone:
            return
        slot.members = [member for member in slot.members if member not in gone]
        if not slot.members:
            broadcast_2d_eviction(self._grid, slot.key)
            return
        longest = max(member.longest for member in slot.members)
        for manager in self._grid.values():
            manager.reserve(slot.key, len(slot.members), longest)

    def started(self, job: Job) -> None:
        """The first step of ``job`` is sent, or never will be: what it copies may go."""
        if job.source is not None:
            self._prefixes.unpin(job.source)
            job.source = None

    def remember(self, job: Job) -> Iterator[tuple[Entry, Operation]]:
        """The prompts of a job that are worth it, each with the operation that keeps it."""
        for row, sequence in enumerate(job.rows):
            prompt = sequence.request.prompt
            if not self._prefixes.wants(prompt):
                continue
            entry = Entry(next(self._handles), prompt[:-1])
            if len(self._prefixes) >= self._prefixes.capacity:
                self._evict()
            if self._claim(_key(entry), 1, len(entry.tokens)) is not None:
                continue
            self._prefixes.add(entry)
            if job.merged:
                yield entry, Extract(entry.handle, job.handle, row)
            else:
                yield entry, Copy(entry.handle, job.handle)

    def forget(self, entry: Entry) -> None:
        """Give up an entry that the stages may not all hold."""
        self._prefixes.discard(entry.handle)
        self._give_back(entry)

    def _place(self) -> Slot | None:
        """The slot that the next sequence goes to; None if all are full.

        Without a wanted size, every stage has a slot, and further ones are there for those who
        find these full; with one, a slot that is begun is filled first.
        """
        wanted = self._limits.micro_batch
        open_slots = [s for s in self._slots if len(s.members) < self._limits.batch]
        if wanted is None:
            ours = [slot for slot in open_slots if slot.key < self._stages]
            if not ours:
                return max(open_slots, key=lambda slot: len(slot.members), default=None)
            open_slots = ours
        else:
            for slot in open_slots:
                if 0 < len(slot.members) < wanted:
                    return slot
        return min(open_slots, key=lambda slot: len(slot.members), default=None)

    def _reserve(self, slot: Slot, sequence: Sequence) -> bool:
        """Memory for one more row; remembered prompts make room for it."""
        rows = len(slot.members) + 1
        longest = max([sequence.longest, *(member.longest for member in slot.members)])
        while (refusal := self._claim(slot.key, rows, longest)) is not None:
            if not self._evict():
                break
        if refusal is not None and sequence is not self._refused:
            self._refused = sequence  # one refusal a sequence, not one a step
            self._on_refusal(refusal)
        return refusal is None

    def _claim(self, batch: int, rows: int, longest: int) -> AdmissionDiagnostic | None:
        return coordinated_admission_with_attribution(self._grid, batch, rows, longest)

    def _begin(self, slot: Slot, rows: list[Sequence], start: Start | None = None) -> Job:
        handle = next(self._handles)
        requests = [sequence.request for sequence in rows]
        work = prompt_work(handle, requests, self._limits.chunk, self._handles, start, self._ends)
        job = Job(handle, slot, rows, deque(work))
        if start is not None:
            job.source, rows[0].cached = start.source, start.cached
            self._prefixes.pin(start.source)
        return job

    def _evict(self) -> bool:
        """Forget the least recently used prompt; False if there is none."""
        entry = self._prefixes.evict()
        if entry is None:
            return False
        self._give_back(entry)
        return True

    def _give_back(self, entry: Entry) -> None:
        self.orphans.append(Release(entry.handle))
        broadcast_2d_eviction(self._grid, _key(entry))


def _key(entry: Entry) -> int:
    """What a remembered prompt's memory is reserved under; slots count from 0."""
    return -1 - entry.handle


def _packed(group: list[Sequence], limits: Limits) -> Iterator[list[Sequence]]:
    """Prompts that fit into one step together, padded, so that short ones share a pass."""
    rows: list[Sequence] = []
    for sequence in group:
        together = [*rows, sequence]
        columns = max(len(s.request.prompt) for s in together)
        grammar = sum(len(s.request.grammar or "") for s in together)
        unlike = limits.equal and len({len(s.request.prompt) for s in together}) > 1
        if rows and (unlike or columns * len(together) > limits.chunk or grammar > MOST_GRAMMAR):
            yield rows
            rows = []
        rows.append(sequence)
    if rows:
        yield rows
