"""Memory of loading a mixture of experts, whose tensors sanitize puts together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlxcel.testing import random_deepseek

LOAD = """
import json, sys
from pathlib import Path

import mlx.core as mx

from mlxcel.checkpoint.config import read_config
from mlxcel.family.choose import choose_family
from mlxcel.plugins import Plugins
from mlxcel.stage.load import load_stage

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

path, start, stop, cast = json.loads(sys.argv[1])
_, family = choose_family(read_config(Path(path)), Plugins.discover())
family.stage_class()
checkpoint = family.open(Path(path))
before = status("VmRSS")
stage = load_stage(checkpoint, family, start, stop, cast)
print(json.dumps({"bytes": stage.nbytes(), "peak": status("VmHWM") - before}))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_deepseek(tmp_path_factory.mktemp("moe"), megabytes=400, layers=4)


@pytest.mark.parametrize(
    ("start", "stop", "cast"),
    [(0, 4, None), (0, 2, None), (2, 4, None), (0, 4, "float32"), (2, 4, "float32")],
)
def test_peak_of_loading(checkpoint: Path, start: int, stop: int, cast: str | None) -> None:
    """Experts are stacked and cast one matrix after the other, never a layer at once."""
    arguments = json.dumps([str(checkpoint), start, stop, cast])
    command = [sys.executable, "-c", LOAD, arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["bytes"] > (stop - start) / 4 * 250e6
    assert measured["peak"] <= 1.15 * measured["bytes"] + 60e6, measured
