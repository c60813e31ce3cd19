"""What workers that fail together have in common, with reports and no workers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlxcel.errors import MlxcelError, RankLinkBroken, WorkerFailed
from mlxcel.pipeline import workers
from mlxcel.pipeline.channel import Channel
from mlxcel.pipeline.link import Inbox, Outbox
from mlxcel.pipeline.report import Failed
from mlxcel.pipeline.workers import WorkerPipeline

LATE, CLOSED = "", "it has closed the connection"


class Told(WorkerPipeline):
    """Two ranks of one stage that have said so much, and nothing else."""

    def __init__(self, said: Sequence[Failed]) -> None:
        super().__init__(1, credits=1, timeout=1.0, ranks=2)
        self.said = said

    def _launch(self) -> tuple[Outbox, Inbox]:
        for failed in self.said:
            self.reports.put(failed)
        return Channel(1, "engine-0"), Channel(1, "0-engine")

    def _join(self, deadline: float) -> None:
        pass


def missing(rank: int, missed: int, broken: str) -> Failed:
    words = f"rank {missed} of stage 0 is lost: {broken or 'nothing came through within 2 s'}"
    error = WorkerFailed(0, "RankLost", words, rank=rank, lost=(0, missed), broken=broken)
    return Failed(0, error, rank)


def raised(said: Sequence[Failed], monkeypatch: pytest.MonkeyPatch) -> MlxcelError:
    monkeypatch.setattr(workers, "CAUSE_SECONDS", 0.0)
    with pytest.raises(MlxcelError) as caught:
        Told(said).start()
    return caught.value


@pytest.mark.parametrize("order", [1, -1])
def test_a_rank_that_was_late_is_named(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it reports first that the one which gave up on it has closed the connection."""
    said = [missing(0, 1, LATE), missing(1, 0, CLOSED)][::order]
    assert "rank 1 of stage 0 is lost: nothing came" in str(raised(said, monkeypatch))


def test_a_connection_that_broke_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the ranks that lost it is to blame."""
    said = [missing(0, 1, "Broken pipe"), missing(1, 0, CLOSED)]
    assert isinstance(raised(said, monkeypatch), RankLinkBroken)
