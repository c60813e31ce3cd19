"""Which errors of the engine clients may try again after, and what they are called."""

from __future__ import annotations

import pytest

from mlxcel.errors import (
    ChannelClosed,
    DeadlineError,
    MlxcelError,
    PeerLost,
    StageError,
    Unavailable,
    WorkerDied,
    WorkerFailed,
    WorkerSilent,
)
from mlxcel.server.errors import as_api_error

LOST = PeerLost("stage-1", "10.0.0.2:19001", "it has not answered for 5.0 s")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LOST, "stage_lost"),
        (WorkerDied(1, 7, "killed by SIGKILL"), "stage_lost"),
        (WorkerFailed(1, "RankLost", "rank 1 of stage 1 is lost", rank=0), "stage_lost"),
        (WorkerSilent(1, 7, 10.0, rank=1), "stage_lost"),
        (ChannelClosed("engine to stage 0", None), "stage_lost"),
        (StageError(0, "a step", "ValueError: no"), "stage_failed"),
        (DeadlineError("the pipeline", "a step's result", 1.0, "Wait."), "deadline"),
        (Unavailable("It loads."), "unavailable"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_be_tried_again(error: MlxcelError, code: str) -> None:
    """A lost stage is nobody's fault who asks: status 503, with the time to try again."""
    told = as_api_error(error)
    assert (told.status, told.code) == (503, code)
    assert told.message == str(error)
    assert told.body()["error"]["retryable"] is True
    assert "Retry-After" in told.headers()
