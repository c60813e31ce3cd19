"""The arithmetic of a pipeline: who could work when, and how much time is lost waiting.

A pure prediction after GPipe (Huang et al. 2019, arXiv:1811.06965), for reports, trace
checks and simulation; the runtime is driven by steps and credits, not by this.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from mlxcel.errors import UsageError


@attrs.frozen
class Receive:
    """The stage takes in this micro-batch's activations from the stage before it."""

    stage_index: int
    micro_batch_id: int


@attrs.frozen
class Forward:
    """The stage runs its layers on this micro-batch."""

    stage_index: int
    micro_batch_id: int


@attrs.frozen
class Flush:
    """The last stage emits this micro-batch's output."""

    micro_batch_id: int


@attrs.frozen
class Idle:
    """Nothing is ready for the stage in this time slot."""


@attrs.frozen
class Done:
    """All micro-batches are finished."""


Event = Forward | Receive | Flush | Idle | Done


@attrs.frozen
class GPipeSchedule:
    """``micro_batches`` micro-batches through ``stages`` stages, one pass.

    Time runs in slots of one forward each. Stage ``s`` runs micro-batch ``b`` in slot
    ``s + b``: the activations that stage ``s - 1`` made in the slot before are received at
    the slot's beginning, and the last stage flushes at its end. A stage idles in all other
    slots; there are ``stages + micro_batches - 1`` of them.

    Iterating gives all events, slot by slot and within a slot in the order of the stages,
    then one :class:`Done`.

    Raises:
        UsageError: Fewer than one stage or one micro-batch.
    """

    stages: int
    micro_batches: int

    def __attrs_post_init__(self) -> None:
        _at_least_one("stages", self.stages)
        _at_least_one("micro-batches", self.micro_batches)

    @property
    def slots(self) -> int:
        """The length of the pass, in time slots."""
        return self.stages + self.micro_batches - 1

    @property
    def bubble_fraction(self) -> float:
        """The share of its time that a stage idles: (k-1) / (m+k-1)."""
        return (self.stages - 1) / self.slots

    def slot(self, stage: int, time: int) -> tuple[Event, ...]:
        """What ``stage`` does in time slot ``time``, in order."""
        micro_batch = time - stage
        if not 0 <= micro_batch < self.micro_batches:
            return (Idle(),)
        events: list[Event] = [Forward(stage, micro_batch)]
        if stage > 0:
            events.insert(0, Receive(stage, micro_batch))
        if stage == self.stages - 1:
            events.append(Flush(micro_batch))
        return tuple(events)

    def events(self, stage: int) -> Iterator[Event]:
        """What ``stage`` does from the first slot to the last, then :class:`Done`."""
        for time in range(self.slots):
            yield from self.slot(stage, time)
        yield Done()

    def __iter__(self) -> Iterator[Event]:
        for time in range(self.slots):
            for stage in range(self.stages):
                yield from self.slot(stage, time)
        yield Done()


def circulating_bubble(stages: int, micro_batches: int) -> float:
    """The share of its time that a stage idles while ``micro_batches`` circulate for ever.

    In decoding, a micro-batch enters the first stage again as soon as it leaves the last, so
    that k of them keep k stages busy: (k-m)/k for m < k, else 0.

    Raises:
        UsageError: Fewer than one stage or one micro-batch.
    """
    _at_least_one("stages", stages)
    _at_least_one("micro-batches", micro_batches)
    return max(stages - micro_batches, 0) / stages


def suggested_micro_batch_size(batch: int, stages: int) -> int:
    """The rows of a micro-batch that spread ``batch`` rows over all stages: ceil(batch/stages).

    Raises:
        UsageError: Fewer than one row or one stage.
    """
    _at_least_one("rows in a batch", batch)
    _at_least_one("stages", stages)
    return -(-batch // stages)


def _at_least_one(what: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"A pipeline cannot have {value} {what}.", "Give 1 or more.")
