"""Which step goes out next: continuous batching over the slots of a pipeline.

Pure bookkeeping, no threads and no clock: sequences come in, steps go out, answers come
back, outputs come out. The rules:

- A *slot* is one batch that decodes, with at most one step in flight. There are at least as
  many slots as stages, so that every stage has work.
- A *job* brings the prompts of one or more new sequences through the stages, chunk after
  chunk; when their first tokens are there, its rows join their slot while the slot rests.
- Rows leave a slot the same way: what is finished or cancelled is filtered out with the
  slot's next step. Operations travel with the steps, so every stage does it at the same point.
- Memory is reserved on all stages for a sequence's prompt and all its tokens before its
  first step, or the sequence waits.
- Slots that rest go before prompts, and only so many chunks are in flight that a decode step
  never waits behind more than one of them per stage.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Many

import attrs

from mlxcel.engine.kv_manager import (
    AdmissionDiagnostic,
    RejectionReason,
    StageKVManager,
    coordinated_admission_with_attribution,
)
from mlxcel.engine.prefix_cache import Entry, PrefixCache
from mlxcel.engine.sequence import Output, Sequence, State
from mlxcel.engine.slot import Start, Work, prompt_work, token_tensor
from mlxcel.errors import MlxcelError, StageError
from mlxcel.pipeline.operations import Copy, Extend, Extract, Filter, Merge, Operation, Release
from mlxcel.pipeline.step import FAILED_ROW, Step, StepFailed, Tokens

NO_HANDLE = -1
"""The slot of a step that runs no batch."""


@attrs.frozen
class Limits:
    """What an operator allows.

    ``parallel`` sequences at once, ``batch`` rows in one step at most, ``micro_batch`` rows a
    slot is filled up to (None: as many slots as stages), ``chunk`` prompt tokens in one step.
    """

    parallel: int = 32
    batch: int = 32
    micro_batch: int | None = None
    chunk: int = 512


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


@attrs.frozen
class Flight:
    """A step in flight: whose it is, which sequences its tokens are for, what it remembers.

    A step that only gives batches back is nobody's.
    """

    owner: Slot | Job | None
    rows: tuple[Sequence, ...] = ()
    entries: tuple[Entry, ...] = ()


def slots_for(stages: int, limits: Limits) -> int:
    """The slots that circulate: one a stage at least, more if they are to stay small."""
    rows = limits.micro_batch
    return stages if rows is None else max(stages, math.ceil(limits.parallel / rows))


def credits_for(stages: int, limits: Limits) -> int:
    """Steps in flight at most: one a slot, two chunks a stage, one that gives batches back."""
    return slots_for(stages, limits) + 2 * stages + 1


class Scheduler:
    """See the module.

    Args:
        stages: The number of stages.
        managers: The cache budget of each stage; none is unlimited.
        end_tokens: Token ids that end a text.
        limits: What the operator allows.
        prefixes: Prompts that the stages remember; None remembers nothing.
        on_refusal: Told a stage's refusal to admit, once a sequence, for metrics.
    """

    def __init__(
        self,
        stages: int,
        managers: Many[StageKVManager],
        end_tokens: Collection[int],
        limits: Limits,
        on_refusal: Callable[[AdmissionDiagnostic], None] = lambda diagnostic: None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.limits = limits
        self.managers = managers
        self.waiting: deque[Sequence] = deque()
        self.in_flight = 0
        self._stages = stages
        self._end_tokens = frozenset(end_tokens)
        self._on_refusal = on_refusal
        self._prefixes = PrefixCache((), capacity=0) if prefixes is None else prefixes
        self.credits = credits_for(stages, limits)
        self.slots = [Slot(key) for key in range(slots_for(stages, limits))]
        self._turns = deque(self.slots)
        self._jobs: deque[Job] = deque()
        self._flights: dict[int, Flight] = {}
        self._handles = itertools.count()
        self._seq = itertools.count()
        self._orphans: list[Operation] = []
        self._giving_back = False
        self._refused: Sequence | None = None

    @property
    def active(self) -> int:
        """Sequences that hold a place."""
        return sum(len(slot.members) for slot in self.slots)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs or has to be given back."""
        return not (self.waiting or self.in_flight or self.active or self._orphans)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def impossible(self, sequence: Sequence) -> AdmissionDiagnostic | None:
        """The stage that could not hold ``sequence`` even if it were alone; None if all could."""
        for manager in self.managers:
            needed = manager.bytes_of(1, sequence.longest)
            if manager.budget is not None and needed > manager.budget:
                reason = RejectionReason.MEMORY
                return AdmissionDiagnostic(manager.stage, reason, 0, manager.budget, 0, needed)
        return None

    def steps(self) -> Iterator[Step]:
        """The steps to send now."""
        self._admit()
        for job in list(self._jobs):
            self._settle(job)
        for _ in range(len(self._turns)):
            slot = self._turns[0]
            self._turns.rotate(-1)
            if not slot.busy and (step := self._decode(slot)) is not None:
                yield step
        chunks = sum(job.in_flight for job in self._jobs)
        decoding = any(slot.rows for slot in self.slots)
        room = (self._stages if decoding else 2 * self._stages) - chunks
        for job in list(self._jobs):
            while room > 0 and job.work:
                room -= 1
                yield self._prefill(job)
        if self._orphans and not self._giving_back:
            self._giving_back = True
            operations, self._orphans = tuple(self._orphans), []
            yield self._step(Flight(None), NO_HANDLE, operations, ())

    def take(self, answer: Tokens | StepFailed) -> list[Output]:
        """What an answer brings to the sequences of its step."""
        flight = self._flights.pop(answer.seq)
        self.in_flight -= 1
        outputs: list[Output] = []
        if isinstance(answer, StepFailed):
            outputs = self._fail(flight, StageError(answer.stage, "a step", answer.cause))
        elif answer.tokens:
            outputs = [
                self._advance(sequence, token)
                for sequence, token in zip(flight.rows, answer.tokens, strict=True)
                if not sequence.finished
            ]
        if isinstance(flight.owner, Slot):
            flight.owner.busy = False
        elif isinstance(flight.owner, Job):
            flight.owner.in_flight -= 1
            self._settle(flight.owner)
        else:
            self._giving_back = False
        return outputs

    def cancel(self, index: int) -> Output | None:
        """End a request for its client at once; its rows leave with the slot's next step."""
        for sequence in itertools.chain(self.waiting, *(slot.members for slot in self.slots)):
            if sequence.request.index == index and not sequence.finished:
                if sequence.state is State.WAITING:
                    self.waiting.remove(sequence)
                return sequence.finish("cancelled")
        return None

    def expire(self, before: float) -> list[Sequence]:
        """Take out the sequences that arrived ``before`` and still wait for a place."""
        late = []
        while self.waiting and self.waiting[0].arrived < before:  # they stand as they arrived
            late.append(self.waiting.popleft())
        return late

    def everything(self) -> list[Sequence]:
        """All sequences that are not finished."""
        held = itertools.chain(self.waiting, *(slot.members for slot in self.slots))
        return [sequence for sequence in held if not sequence.finished]

    # Admission.

    def _admit(self) -> None:
        """Give places to those who wait, in their order, as long as there are any."""
        groups: dict[int, list[Sequence]] = {}
        while self.waiting and self.active < self.limits.parallel:
            slot = self._place()
            if slot is None or not self._reserve(slot, self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            sequence.state = State.PENDING_PREFILL
            slot.members.append(sequence)
            if (start := self._prefixes.find(sequence.request.prompt)) is not None:
                self._begin(slot, [sequence], start)
            else:
                groups.setdefault(slot.key, []).append(sequence)
        for key, group in groups.items():
            for rows in _packed(group, self.limits.chunk):
                self._begin(self.slots[key], rows)

    def _place(self) -> Slot | None:
        """The slot that the next sequence goes to; None if all are full."""
        wanted = self.limits.micro_batch
        open_slots = [s for s in self.slots if len(s.members) < self.limits.batch]
        if wanted is not None:
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
        return coordinated_admission_with_attribution(self.managers, batch, rows, longest)

    def _begin(self, slot: Slot, rows: list[Sequence], start: Start | None = None) -> None:
        handle = next(self._handles)
        requests = [sequence.request for sequence in rows]
        work = deque(prompt_work(handle, requests, self.limits.chunk, self._handles, start))
        job = Job(handle, slot, rows, work)
        if start is not None:
            job.source, rows[0].cached = start.source, start.cached
            self._prefixes.pin(start.source)
        self._jobs.append(job)

    def _remember(self, job: Job) -> Iterator[tuple[Entry, Operation]]:
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

    def _evict(self) -> bool:
        """Forget the least recently used prompt; False if there is none."""
        entry = self._prefixes.evict()
        if entry is None:
            return False
        self._give_back(entry)
        return True

    def _give_back(self, entry: Entry) -> None:
        self._orphans.append(Release(entry.handle))
        for manager in self.managers:
            manager.reserve(_key(entry), 0, 0)

    # Steps.

    def _prefill(self, job: Job) -> Step:
        work = job.work.popleft()
        job.in_flight += 1
        self._unpin(job)
        if not work.sample:
            return self._step(Flight(job), job.handle, work.operations, work.tokens)
        # The step of the last tokens: before it runs, what the stages have is the whole prompt.
        kept = tuple(self._remember(job))
        flight = Flight(job, tuple(job.rows), tuple(entry for entry, _ in kept))
        operations = (*work.operations, *(operation for _, operation in kept))
        return self._step(flight, job.handle, operations, work.tokens, True)

    def _unpin(self, job: Job) -> None:
        if job.source is not None:
            self._prefixes.unpin(job.source)
            job.source = None

    def _decode(self, slot: Slot) -> Step | None:
        """The slot's next step: who is finished leaves, who is ready joins, all move on."""
        operations = self._leave(slot)
        for job in slot.joins:
            operations += self._join(slot, job)
        slot.joins.clear()
        self._orphans += [] if slot.rows else operations
        if not slot.rows:
            return None
        slot.busy = True
        tokens = [[sequence.last] for sequence in slot.rows]
        assert slot.handle is not None
        return self._step(
            Flight(slot, tuple(slot.rows)), slot.handle, tuple(operations), tokens, True
        )

    def _leave(self, slot: Slot) -> list[Operation]:
        if slot.handle is None or not any(sequence.finished for sequence in slot.rows):
            return []
        keep = [row for row, sequence in enumerate(slot.rows) if not sequence.finished]
        handle = slot.handle
        self._forget(slot, [sequence for sequence in slot.rows if sequence.finished])
        slot.rows = [slot.rows[row] for row in keep]
        if keep:
            return [Filter(handle, tuple(keep))]
        slot.handle, slot.merged = None, False
        return [Release(handle)]

    def _join(self, slot: Slot, job: Job) -> list[Operation]:
        keep = [row for row, sequence in enumerate(job.rows) if not sequence.finished]
        self._forget(slot, [sequence for sequence in job.rows if sequence.finished])
        if not keep:
            return [Release(job.handle)]
        operations: list[Operation] = []
        if len(keep) < len(job.rows):
            operations.append(Filter(job.handle, tuple(keep)))
        joining, merged = job.handle, job.merged
        if slot.handle is None:
            slot.handle, slot.merged = joining, merged
        else:
            if not slot.merged:
                operations.append(Merge(fresh := next(self._handles), (slot.handle,)))
                slot.handle, slot.merged = fresh, True
            if not merged:
                operations.append(Merge(fresh := next(self._handles), (joining,)))
                joining = fresh
            operations.append(Extend(slot.handle, joining))
        for row in keep:
            job.rows[row].state = State.DECODING
        slot.rows += [job.rows[row] for row in keep]
        return operations

    def _step(
        self,
        flight: Flight,
        handle: int,
        operations: tuple[Operation, ...],
        tokens: Many[Many[int]],
        sample: bool = False,
    ) -> Step:
        seq = next(self._seq)
        self._flights[seq] = flight
        self.in_flight += 1
        tensors = {"tokens": token_tensor(tokens)} if tokens else {}
        return Step(seq, handle, operations, tensors, sample)

    # Answers.

    def _advance(self, sequence: Sequence, token: int) -> Output:
        if token == FAILED_ROW:
            error = StageError(self._stages - 1, "sampling", "the logits are not numbers (NaN)")
            return sequence.finish("error", error=error)
        return sequence.advance(token, token in self._end_tokens)

    def _settle(self, job: Job) -> None:
        """After a step of a job: give up what nobody waits for, or hand its rows to its slot."""
        if all(sequence.finished for sequence in job.rows):
            job.work.clear()
            self._unpin(job)
        if job.work or job.in_flight:
            return
        self._jobs.remove(job)
        job.slot.joins.append(job)

    def _fail(self, flight: Flight, error: MlxcelError) -> list[Output]:
        """A stage could not run a step: its batch is lost, the others go on."""
        for entry in flight.entries:  # some stages have it, others may not
            self._prefixes.discard(entry.handle)
            self._give_back(entry)
        rows = flight.owner.rows if flight.owner is not None else []
        return [s.finish("error", error=error) for s in rows if not s.finished]

    def _forget(self, slot: Slot, gone: list[Sequence]) -> None:
        """Give back the memory of sequences whose rows leave with the step being made."""
        if not gone:
            return
        slot.members = [member for member in slot.members if member not in gone]
        longest = max((member.longest for member in slot.members), default=0)
        for manager in self.managers:
            manager.reserve(slot.key, len(slot.members), longest)


def _key(entry: Entry) -> int:
    """What a remembered prompt's memory is reserved under; slots count from 0."""
    return -1 - entry.handle


def _packed(group: list[Sequence], chunk: int) -> Iterator[list[Sequence]]:
    """Prompts that fit into one step together, padded, so that short ones share a pass."""
    rows: list[Sequence] = []
    for sequence in group:
        longest = max(len(s.request.prompt) for s in [*rows, sequence])
        if rows and longest * (len(rows) + 1) > chunk:
            yield rows
            rows = []
        rows.append(sequence)
    if rows:
        yield rows
