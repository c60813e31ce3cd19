"""What flags make of the model on this machine and of what runs it."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcel.cli.local_model import open_local_model, run_local_model
from mlxcel.cli.main import build_parser
from mlxcel.errors import UsageError
from mlxcel.pipeline.processes import SILENT_SECONDS
from mlxcel.stage.blas import BlasChoice

BLAS = BlasChoice({}, "")


def parsed(*flags: str, command: str = "serve") -> Any:
    return build_parser().parse_args([command, "-m", "models/some", *flags])


@pytest.mark.parametrize(
    ("flags", "command", "grace"),
    [
        ((), "serve", SILENT_SECONDS),
        (("--cluster-heartbeat-grace", "60"), "serve", 60.0),
        (("--pp-workers", "process", "-p", "x"), "generate", SILENT_SECONDS),
    ],
)
def test_the_grace_of_worker_processes(flags: tuple[str, ...], command: str, grace: float) -> None:
    """A server's flag holds for its own workers; unless it is given, theirs is longer."""
    run = run_local_model(parsed(*flags, command=command), None, BLAS)  # type: ignore[arg-type]
    assert run.keywords["grace"] == grace  # type: ignore[attr-defined]


def test_threads_have_no_grace() -> None:
    """The flag is refused where it would mean nothing."""
    flags = ("--pp-workers", "thread", "--cluster-heartbeat-grace", "60")
    with pytest.raises(UsageError, match="--cluster-heartbeat-grace has no effect"):
        open_local_model(parsed(*flags), BLAS)
