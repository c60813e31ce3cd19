"""Which errors of the engine clients may try again after, and what they are called."""

from __future__ import annotations

import pytest

from mlxcel.errors import (
    ChannelClosed,
    DeadlineError,
    InternalError,
    LogitsError,
    MlxcelError,
    PeerLost,
    RankLinkBroken,
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
        (RankLinkBroken(1, 0, 1, "Broken pipe"), "stage_lost"),
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
    assert told.message == str(error) or isinstance(error, StageError)
    assert told.body()["error"]["retryable"] is True
    assert "Retry-After" in told.headers()


@pytest.mark.parametrize("error", [LogitsError(), InternalError("the engine", "ValueError: no")])
def test_what_would_fail_again(error: MlxcelError) -> None:
    """What the same request would meet again is no invitation to repeat it."""
    told = as_api_error(error)
    assert told.status == 500
    assert "retryable" not in told.body()["error"]
    assert told.headers() == {}


@pytest.mark.parametrize("error", [StageError(1, "a step", "ValueError: no"), LogitsError()])
def test_flags_are_the_operators(error: MlxcelError) -> None:
    """A client is told what it can do itself, and what whoever runs the server can."""
    message = as_api_error(error).message
    assert "whoever runs the server" in message
    assert "--pp-size" not in message
