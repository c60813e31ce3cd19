"""Which step goes out next: continuous batching over the slots of a pipeline.

Pure bookkeeping, no threads and no clock: sequences come in, steps go out, answers come
back, outputs come out. The rules:

- A *slot* is one batch that decodes, with at most one step in flight. There are at least as
  many slots as stages, so that every stage has work.
- A *job* brings the prompts of one or more new sequences through the stages, chunk after
  chunk; when their first tokens are there, its rows join their slot while the slot rests.
  :mod:`mlxcel.engine.admission` says who gets into a job.
- Rows leave a slot the same way: what is finished or cancelled is filtered out with the
  slot's next step. Operations travel with the steps, so every stage does it at the same point.
- Slots that rest go before prompts, and only so many chunks are in flight that a decode step
  never waits behind more than one of them per stage.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Many

import attrs

from mlxcel.engine.admission import Admission, Job, Slot
from mlxcel.engine.kv_manager import AdmissionDiagnostic, StageKVManager
from mlxcel.engine.limits import Limits, credits_for, slots_for
from mlxcel.engine.prefix_cache import Entry, PrefixCache
from mlxcel.engine.sequence import Output, Sequence, State
from mlxcel.engine.slot import token_tensor
from mlxcel.errors import GrammarFailed, LogitsError, MlxcelError, StageError
from mlxcel.pipeline.operations import Extend, Filter, Merge, Operation, Release
from mlxcel.pipeline.step import FAILED_GRAMMAR, FAILED_ROW, Step, StepFailed, Tokens

NO_HANDLE = -1
"""The slot of a step that runs no batch."""


@attrs.frozen
class Flight:
    """A step in flight: whose it is, which sequences its tokens are for, what it remembers.

    A step that only gives batches back is nobody's.
    """

    owner: Slot | Job | None
    rows: tuple[Sequence, ...] = ()
    entries: tuple[Entry, ...] = ()


class Scheduler:
    """See the module.

    Args:
        stages: The number of stages.
        managers: The cache budget of each worker; none is unlimited.
        end_tokens: Token ids that end a text.
        limits: What the operator allows.
        on_refusal: Told a stage's refusal to admit, once a sequence, for metrics.
        prefixes: Prompts that the stages remember; None remembers nothing.
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
        self.in_flight = 0
        self.credits = credits_for(stages, limits)
        self.slots = [Slot(key) for key in range(slots_for(stages, limits))]
        self._stages = stages
        self._end_tokens = frozenset(end_tokens)
        self._handles = itertools.count()
        self._admission = Admission(
            stages,
            self.slots,
            managers,
            tuple(sorted(self._end_tokens)),
            limits,
            PrefixCache((), capacity=0) if prefixes is None else prefixes,
            self._handles,
            on_refusal,
        )
        self._turns = deque(self.slots)
        self._jobs: deque[Job] = deque()
        self._flights: dict[int, Flight] = {}
        self._seq = itertools.count()
        self._giving_back = False

    @property
    def waiting(self) -> deque[Sequence]:
        """Sequences without a place, in the order of arrival."""
        return self._admission.waiting

    @property
    def active(self) -> int:
        """Sequences that hold a place."""
        return self._admission.active

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs or has to be given back."""
        return not (self.waiting or self.in_flight or self.active or self._admission.orphans)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def impossible(self, sequence: Sequence) -> AdmissionDiagnostic | None:
        """The worker that could not hold ``sequence`` even if it were alone; None if all could."""
        return self._admission.impossible(sequence)

    def steps(self) -> Iterator[Step]:
        """The steps to send now."""
        self._jobs += self._admission.admit()
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
        if self._admission.orphans and not self._giving_back:
            self._giving_back = True
            operations = tuple(self._admission.orphans)
            self._admission.orphans.clear()
            yield self._step(Flight(None), NO_HANDLE, operations, ())

    def take(self, answer: Tokens | StepFailed) -> list[Output]:
        """What an answer brings to the sequences of its step."""
        flight = self._flights.pop(answer.seq)
        self.in_flight -= 1
        outputs: list[Output] = []
        if isinstance(answer, StepFailed):
            outputs = self._fail(flight, StageError(answer.stage, "a step", answer.cause))
        elif answer.tokens:
            outputs = list(self._advance(flight.rows, answer))
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
        for sequence in self.everything():
            if sequence.request.index == index:
                if sequence.state is State.WAITING:
                    self.waiting.remove(sequence)
                return sequence.finish("cancelled")
        return None

    def expire(self, before: float) -> list[Sequence]:
        """Take out the sequences that arrived ``before`` and still wait for a place."""
        return self._admission.expire(before)

    def everything(self) -> list[Sequence]:
        """All sequences that are not finished."""
        held = itertools.chain(self.waiting, *(slot.members for slot in self.slots))
        return [sequence for sequence in held if not sequence.finished]

    # Steps.

    def _prefill(self, job: Job) -> Step:
        work = job.work.popleft()
        job.in_flight += 1
        self._admission.started(job)
        if not work.sample:
            return self._step(Flight(job), job.handle, work.operations, work.tokens)
        # The step of the last tokens: before it runs, what the stages have is the whole prompt.
        kept = tuple(self._admission.remember(job))
        flight = Flight(job, tuple(job.rows), tuple(entry for entry, _ in kept))
        operations = (*work.operations, *(operation for _, operation in kept))
        return self._step(flight, job.handle, operations, work.tokens, True)

    def _decode(self, slot: Slot) -> Step | None:
        """The slot's next step: who is finished leaves, who is ready joins, all move on."""
        operations = self._leave(slot)
        for job in slot.joins:
            operations += self._join(slot, job)
        slot.joins.clear()
        if not slot.rows:
            self._admission.orphans += operations
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
        self._admission.leave(slot, [sequence for sequence in slot.rows if sequence.finished])
        slot.rows = [slot.rows[row] for row in keep]
        if keep:
            return [Filter(handle, tuple(keep))]
        slot.handle, slot.merged = None, False
        return [Release(handle)]

    def _join(self, slot: Slot, job: Job) -> list[Operation]:
        keep = [row for row, sequence in enumerate(job.rows) if not sequence.finished]
        self._admission.leave(slot, [sequence for sequence in job.rows if sequence.finished])
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

    def _advance(self, rows: Many[Sequence], answer: Tokens) -> Iterator[Output]:
        """The outputs of one token per row; who is finished already gets none."""
        found = answer.logprobs or (None,) * len(rows)
        causes = iter(answer.causes)
        for sequence, token, logprobs in zip(rows, answer.tokens, found, strict=True):
            error: MlxcelError | None = None
            if token == FAILED_GRAMMAR:
                error = GrammarFailed(next(causes, "the stage gave no reason"))
            elif token == FAILED_ROW:
                error = LogitsError()
            if sequence.finished:
                continue
            if error is not None:
                yield sequence.finish("error", error=error)
            else:
                yield sequence.advance(token, token in self._end_tokens, logprobs)

    def _settle(self, job: Job) -> None:
        """After a step of a job: give up what nobody waits for, or hand its rows to its slot."""
        if all(sequence.finished for sequence in job.rows):
            job.work.clear()
            self._admission.started(job)
        if job.work or job.in_flight:
            return
        self._jobs.remove(job)
        job.slot.joins.append(job)

    def _fail(self, flight: Flight, error: MlxcelError) -> list[Output]:
        """A stage could not run a step: its batch is lost, the others go on."""
        for entry in flight.entries:  # some stages have it, others may not
            self._admission.forget(entry)
        rows = flight.owner.rows if flight.owner is not None else []
        return [s.finish("error", error=error) for s in rows if not s.finished]
