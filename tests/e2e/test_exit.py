"""How the process of ``mlxcel generate`` ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Tiny = Callable[..., Path]

COMMAND = (sys.executable, "-c", "import sys; from mlxcel.cli.main import run; sys.exit(run())")


def generate(path: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "generate", "-m", str(path), "-p", "Hello", "-n", "4", *flags],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_worker_threads_leave_no_abort(tiny: Tiny) -> None:
    """Twenty runs with three stages all end with 0, and with the same tokens."""
    path = tiny("llama")
    runs = [generate(path, "--pp-size", "3", "--json") for _ in range(20)]
    assert [done.returncode for done in runs] == [0] * 20
    assert len({str(json.loads(done.stdout.splitlines()[0])["tokens"]) for done in runs}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("threading.Event().wait()", "stage 2 did not answer within 2 s"),
        ("raise ValueError('on purpose')", "ValueError: on purpose"),
        ("raise SystemExit(7)", "SystemExit: 7"),
    ],
    ids=["hangs", "fails", "exits"],
)
def test_a_bad_stage_ends_the_command(tiny: Tiny, site: Any, step: str, reason: str) -> None:
    """A stage that hangs, fails or exits makes one line and the exit code 1, and no zombie."""
    site.hooks(
        "bad",
        "import threading\nfrom mlxcel.testing.doubles import ScriptedExecutor\n\n"
        f"def on_step(step):\n    {step}\n\n"
        "@hookimpl\ndef mlxcel_build_executor(spec):\n"
        "    bad = {'on_step': on_step} if spec.index == 1 else {}\n"
        "    return ScriptedExecutor(spec, **bad)\n",
    )
    flags = ["--pp-size", "3", "--pp-timeout", "2" if "wait" in step else "60"]
    done = generate(tiny("llama"), *flags, PYTHONPATH=str(site.path))
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    *_, line = done.stderr.splitlines()
    assert line.startswith("mlxcel: error: ")
    assert reason in line
