"""Cache memory on all workers at once: stages, and their ranks where those are workers too.

A sequence is on every worker of the grid, so it gets its memory on all of them or on none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import attrs

from mlxcel.engine.kv_manager import AdmissionDiagnostic, RejectionReason, StageKVManager


@attrs.frozen
class PpTpCoord:
    """A place in the grid; ``rank`` is None where all ranks of the stage are one worker."""

    stage: int
    rank: int | None = None

    def __str__(self) -> str:
        stage = f"stage {self.stage}"
        return stage if self.rank is None else f"rank {self.rank} of {stage}"


Grid = Mapping[PpTpCoord, StageKVManager]
"""The cache budget of each worker."""


def grid_of(managers: Iterable[StageKVManager]) -> Grid:
    """The grid of ``managers``, each at its own place."""
    return {PpTpCoord(manager.stage, manager.rank): manager for manager in managers}


@attrs.frozen
class CacheAdmissionRequest:
    """Memory for one sequence, or for a batch of them whose caches are padded alike.

    Attributes:
        seq_id: Who asks; what it holds already counts.
        prompt_len: Positions of the longest row, with all that it may still generate.
        rows: Sequences of the batch.
    """

    seq_id: int
    prompt_len: int
    rows: int = 1


@attrs.frozen
class Admitted:
    """Every worker has reserved what was asked for."""


@attrs.frozen
class Rejected:
    """The worker ``at`` refused, so nothing has changed on any; its figures tell more."""

    at: PpTpCoord
    reason: RejectionReason
    diagnostic: AdmissionDiagnostic


def coordinated_2d_admission(grid: Grid, request: CacheAdmissionRequest) -> Admitted | Rejected:
    """Reserve on all workers, or change nothing and say which was the first to refuse."""
    asked = (request.seq_id, request.rows, request.prompt_len)
    for at, manager in grid.items():
        if (diagnostic := manager.check(*asked)) is not None:
            return Rejected(at, diagnostic.reason, diagnostic)
    for manager in grid.values():
        manager.reserve(*asked)
    return Admitted()


def coordinated_admission_with_attribution(
    grid: Grid, batch: int, rows: int, longest: int
) -> AdmissionDiagnostic | None:
    """Let ``batch`` become that large on all workers, or on none.

    Returns:
        None if all accept, else the first refusal.
    """
    request = CacheAdmissionRequest(batch, longest, rows)
    match coordinated_2d_admission(grid, request):
        case Rejected(diagnostic=diagnostic):
            return diagnostic
        case Admitted():
            return None


def broadcast_2d_eviction(grid: Grid, seq_id: int) -> None:
    """Have every worker give back what ``seq_id`` holds."""
    for manager in grid.values():
        manager.reserve(seq_id, 0, 0)


@attrs.frozen
class StageUse:
    """The cache memory of one stage: of its tightest rank, as no sequence runs without all."""

    managers: tuple[StageKVManager, ...]

    @property
    def tightest(self) -> StageKVManager:
        """The rank that has reserved the largest share of its budget, or has the lowest one."""
        return max(self.managers, key=_tightness)

    @property
    def used(self) -> int:
        """The bytes reserved now."""
        return self.tightest.used

    @property
    def budget(self) -> int | None:
        """The bytes that may be reserved; None if no rank has a limit."""
        return self.tightest.budget


def _tightness(manager: StageKVManager) -> tuple[float, float]:
    if manager.budget is None:
        return 0.0, -math.inf
    return manager.used / manager.budget if manager.budget else 1.0, -manager.budget


def stage_uses(managers: Iterable[StageKVManager]) -> dict[int, StageUse]:
    """What each stage uses, by its index."""
    found: dict[int, StageUse] = {}
    for manager in managers:
        before = found[manager.stage].managers if manager.stage in found else ()
        found[manager.stage] = StageUse((*before, manager))
    return found
