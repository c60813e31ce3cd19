"""Who gets a place and who shares a job; with steps and answers see test_scheduler."""

from __future__ import annotations

import itertools

import pytest

from mlxcel.engine.admission import MOST_GRAMMAR, Admission, Job, Slot
from mlxcel.engine.kv_manager import AdmissionDiagnostic, StageKVManager
from mlxcel.engine.limits import Limits
from mlxcel.engine.prefix_cache import PrefixCache
from mlxcel.engine.sequence import Sequence, State
from mlxcel.engine.slot import Request
from mlxcel.engine.stop_strings import StopStrings
from mlxcel.family import Batching
from mlxcel.family.caches import KVCacheKind
from mlxcel.pipeline.operations import Copy, Extract, New, Release

KIND = KVCacheKind(1, 8, 8)


def sequence(
    index: int, prompt: int = 4, tokens: int = 4, grammar: str | None = None, arrived: float = 0.0
) -> Sequence:
    request = Request(index, tuple(range(1, prompt + 1)), tokens, grammar=grammar)
    return Sequence(request, None, StopStrings(()), arrived=arrived)


def manager(budget: int | None = None) -> StageKVManager:
    return StageKVManager(0, [KIND], budget, itemsize=4, chunk=64)


class Door:
    """An admission to two slots or more for two stages, and what it says."""

    def __init__(
        self, limits: Limits, budget: int | None = None, remembers: int = 0, slots: int = 2
    ) -> None:
        self.refusals: list[AdmissionDiagnostic] = []
        self.manager = manager(budget)
        self.slots = [Slot(key) for key in range(slots)]
        self.admission = Admission(
            2,
            self.slots,
            [self.manager],
            (9,),
            limits,
            PrefixCache([KIND], remembers),
            itertools.count(),
            self.refusals.append,
        )

    def admit(self, *sequences: Sequence) -> list[Job]:
        self.admission.waiting.extend(sequences)
        return self.admission.admit()

    @property
    def members(self) -> list[list[int]]:
        return [[member.request.index for member in slot.members] for slot in self.slots]


def rows(jobs: list[Job]) -> list[list[int]]:
    return [[row.request.index for row in job.rows] for job in jobs]


@pytest.mark.parametrize(
    ("micro_batch", "members"),
    [(None, [[0, 2, 4], [1, 3]]), (2, [[0, 1, 4], [2, 3]]), (3, [[0, 1, 2], [3, 4]])],
)
def test_slots_fill_evenly_or_up_to_what_is_wanted(
    micro_batch: int | None, members: list[list[int]]
) -> None:
    """Without a wish every slot gets its share; with one, a slot is filled up to it first."""
    door = Door(Limits(batch=3, micro_batch=micro_batch))
    door.admit(*map(sequence, range(5)))
    assert door.members == members
    assert door.admission.active == 5


@pytest.mark.parametrize(
    ("count", "sizes"), [(5, [3, 2, 0, 0]), (7, [3, 3, 1, 0]), (8, [3, 3, 2, 0]), (12, [3] * 4)]
)
def test_further_slots_are_for_those_who_find_the_first_full(count: int, sizes: list[int]) -> None:
    """Beyond one slot a stage, batches stay as large as they may be."""
    door = Door(Limits(parallel=12, batch=3), slots=4)
    door.admit(*map(sequence, range(count)))
    assert [len(members) for members in door.members] == sizes


def test_only_so_many_at_once() -> None:
    """The limits of all and of a slot hold; who has no place stays in line."""
    door = Door(Limits(parallel=3))
    door.admit(*map(sequence, range(5)))
    assert [one.request.index for one in door.admission.waiting] == [3, 4]
    assert {one.state for one in door.admission.waiting} == {State.WAITING}
    small = Door(Limits(batch=1))
    small.admit(*map(sequence, range(5)))
    assert small.members == [[0], [1]]


def test_prompts_that_fit_share_a_job() -> None:
    """As many padded prompts go together as a chunk has tokens."""
    door = Door(Limits(chunk=16))
    jobs = door.admit(*(sequence(index, length) for index, length in enumerate([4, 9, 8, 4, 4])))
    assert rows(jobs) == [[0, 2], [4], [1], [3]]


def test_long_grammars_go_apart() -> None:
    """The header of a step has a bound, so it brings only so many characters of grammars."""
    door = Door(Limits())
    half = "g" * (MOST_GRAMMAR // 2)
    jobs = door.admit(*(sequence(index, grammar=half) for index in range(6)), sequence(6))
    assert rows(jobs) == [[0, 2], [4, 6], [1, 3], [5]]
    [new] = [op for op in jobs[-1].work[0].operations if isinstance(op, New)]
    assert (new.grammar, new.ends) == (half, (9,))


def test_who_does_not_fit_holds_the_line() -> None:
    """The first who waits for memory waits, those behind it too; one refusal is reported."""
    door = Door(Limits(), budget=manager().bytes_of(1, 8) + manager().bytes_of(1, 20))
    jobs = door.admit(sequence(0, 4, 4), sequence(1, 40, 4), sequence(2, 1, 1))
    assert rows(jobs) == [[0]]
    assert [one.request.index for one in door.admission.waiting] == [1, 2]
    assert door.admission.admit() == []
    assert len(door.refusals) == 1
    door.admission.leave(door.slots[0], [jobs[0].rows[0]])
    assert (door.members, door.manager.used) == ([[], []], 0)


def test_who_arrived_too_early_leaves() -> None:
    """Those who arrived before a time go, the others stay."""
    door = Door(Limits())
    door.admission.waiting.extend(sequence(i, arrived=float(i)) for i in range(4))
    assert [one.request.index for one in door.admission.expire(2.0)] == [0, 1]
    assert [one.request.index for one in door.admission.waiting] == [2, 3]


def test_prompts_are_remembered_once_and_given_back() -> None:
    """A row of its own is copied, one of several extracted; what is forgotten frees its memory."""
    door = Door(Limits(chunk=128), remembers=2)
    [single] = door.admit(sequence(0, 30))
    [(entry, kept)] = door.admission.remember(single)
    assert kept == Copy(entry.handle, single.handle)
    assert list(door.admission.remember(single)) == []
    used = door.manager.used
    door.admission.forget(entry)
    assert door.admission.orphans == [Release(entry.handle)]
    assert door.manager.used < used
    several = Job(50, door.slots[0], [sequence(1, 3), sequence(2, 31)], single.work)
    [(entry, kept)] = door.admission.remember(several)
    assert kept == Extract(entry.handle, 50, 1)


def test_prompts_of_one_length() -> None:
    """Where padding would get into a state, only prompts of one length share a job."""
    limits = Limits(micro_batch=8).fitting(Batching.EQUAL)
    jobs = Door(limits).admit(*(sequence(i, prompt) for i, prompt in enumerate((4, 4, 6, 4))))
    assert rows(jobs) == [[0, 1], [2], [3]]


def test_one_row_a_slot() -> None:
    """A model that takes one sequence at a time gets slots of one row."""
    limits = Limits(micro_batch=8).fitting(Batching.SINGLE)
    door = Door(limits)
    assert rows(door.admit(sequence(0), sequence(1), sequence(2))) == [[0], [1]]
    assert door.members == [[0], [1]]
    assert limits.fitting(Batching.PADDED) == limits
