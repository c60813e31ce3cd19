"""Who may hold how much cache memory on one worker, decided before it is used.

A worker is a stage, or one rank of a stage whose ranks are workers of their own.

Sequences of one micro-batch share caches that are padded to the longest of them, so what is
reserved, checked and reported is always a batch: rows and longest. All three use
:func:`mlxcel.partition.cache_bytes.cache_bytes`.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence

import attrs

from mlxcel.family.caches import CacheGroup, CacheKind, RotatingCacheKind
from mlxcel.partition.cache_bytes import cache_bytes


class RejectionReason(enum.Enum):
    """Why a stage does not take a sequence."""

    MEMORY = "memory"
    SEQUENCE_CAP = "sequence_cap"
    ALREADY_CACHED = "already_cached"
    REJECTED_BY_STAGE = "rejected_by_stage"

    def metric_label(self) -> str:
        """The value of the label ``reason`` in metrics."""
        return self.value


@attrs.frozen
class AdmissionDiagnostic:
    """The worker that said no, and its figures at that moment.

    ``rank`` is None where the worker is the whole stage.
    """

    stage_index: int
    reason: RejectionReason
    used_memory_bytes: int
    budget_bytes: int
    active_sequences: int
    required_bytes: int = 0
    rank: int | None = None

    def __str__(self) -> str:
        stage = f"stage {self.stage_index}"
        return (
            f"{stage if self.rank is None else f'rank {self.rank} of {stage}'} "
            f"has {self.active_sequences} sequences in "
            f"{self.used_memory_bytes} of {self.budget_bytes} bytes of cache; "
            f"{self.required_bytes} more are needed ({self.reason.metric_label()})"
        )


class StageKVManager:
    """The cache budget of one worker.

    Args:
        stage: The stage's index.
        kinds: What each of its layers keeps of a sequence there.
        budget: Bytes for caches; None is unlimited.
        itemsize: Bytes of one activation.
        chunk: Prompt tokens of one step at most.
        rank: Which rank of its stage the worker is; None if it is the whole stage.
    """

    def __init__(
        self,
        stage: int,
        kinds: Sequence[CacheKind | None],
        budget: int | None,
        *,
        itemsize: int,
        chunk: int,
        rank: int | None = None,
    ) -> None:
        self.stage = stage
        self.rank = rank
        self.budget = budget
        self._kinds = Counter(kind for kind in kinds if kind is not None)
        self._itemsize = itemsize
        self._chunk = chunk
        self._batches: dict[int, _Reservation] = {}

    def bytes_of(self, rows: int, longest: int, ever: int = 0) -> int:
        """The most bytes that a batch of ``rows``, up to ``longest`` tokens each, can take.

        ``ever`` is the longest row that the batch had before; a rotating cache keeps its
        columns when that row leaves.
        """
        ever = max(longest, ever)
        return sum(
            count
            * cache_bytes(
                kind,
                rows,
                ever if _rotates(kind) else longest,
                itemsize=self._itemsize,
                chunk=self._chunk,
            )
            for kind, count in self._kinds.items()
        )

    @property
    def used(self) -> int:
        """The bytes reserved now."""
        batches = list(self._batches.values())  # whoever watches asks from another thread
        return sum(self.bytes_of(b.rows, b.longest, b.ever) for b in batches)

    @property
    def sequences(self) -> int:
        """The sequences that hold a reservation."""
        return sum(batch.rows for batch in list(self._batches.values()))

    def check(self, batch: int, rows: int, longest: int) -> AdmissionDiagnostic | None:
        """Whether ``batch`` may become that large; None means yes, and nothing is changed."""
        used, now = self.used, self._batches.get(batch, _Reservation())
        more = self.bytes_of(rows, longest, now.ever)
        more -= self.bytes_of(now.rows, now.longest, now.ever)
        if self.budget is None or used + more <= self.budget:
            return None
        return self._refusal(used, self.budget, self.sequences, more)

    def impossible(self, longest: int) -> AdmissionDiagnostic | None:
        """Why a sequence of ``longest`` tokens would not fit if it were alone; None if it would."""
        needed = self.bytes_of(1, longest)
        if self.budget is None or needed <= self.budget:
            return None
        return self._refusal(0, self.budget, 0, needed)

    def reserve(self, batch: int, rows: int, longest: int) -> None:
        """Let ``batch`` be that large; no rows gives everything back."""
        if rows:
            ever = self._batches.get(batch, _Reservation()).ever
            self._batches[batch] = _Reservation(rows, longest, max(ever, longest))
        else:
            self._batches.pop(batch, None)

    def _refusal(self, used: int, budget: int, sequences: int, more: int) -> AdmissionDiagnostic:
        reason = RejectionReason.MEMORY
        return AdmissionDiagnostic(self.stage, reason, used, budget, sequences, more, self.rank)


@attrs.frozen
class _Reservation:
    rows: int = 0
    longest: int = 0
    ever: int = 0


def _rotates(kind: CacheKind) -> bool:
    if isinstance(kind, CacheGroup):
        return any(_rotates(part) for part in kind.kinds)
    return isinstance(kind, RotatingCacheKind)
