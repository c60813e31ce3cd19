"""The example of a third-party family."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOY = ROOT / "examples" / "toy_family"
LIST = "import sys; from mlxcel.cli.main import run; sys.exit(run(['plugins', '--json']))"


@pytest.mark.slow
def test_it_installs_and_is_listed(tmp_path: Path) -> None:
    """Installed like any package, the family appears in the listing as loaded."""
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", tmp_path, TOY],
        check=True,
        timeout=300,
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "core")])
    done = subprocess.run(
        [sys.executable, "-c", LIST],
        env={**os.environ, "PYTHONPATH": path, "MLXCEL_PLUGINS": "toy"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    [toy] = [record for record in json.loads(done.stdout) if record["name"] == "toy"]
    assert (toy["state"], toy["distribution"]) == ("loaded", "mlxcel-family-toy")
