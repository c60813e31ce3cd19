"""A stage needs memory for its own tensors, and next to nothing more."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel.testing import random_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self"),
]

FACTOR, FIXED = 1.15, 60e6
"""What a stage may grow by: this share of its own tensors' bytes, and 60 MB."""

CHILD = """
import json, sys
from pathlib import Path
from mlxcel.family.choose import choose_family
from mlxcel.checkpoint.config import read_config
from mlxcel.checkpoint.dtype import choose_dtype
from mlxcel.plugins import Plugins
import mlxcel.stage.load

def memory(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])

path, start, stop, dtype = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
_, family = choose_family(read_config(path), Plugins.discover())
family.stage_class()
checkpoint = family.open(path)
choice = choose_dtype(checkpoint, dtype, "cpu")
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to what is resident now
stage = mlxcel.stage.load.load_stage(checkpoint, family, start, stop, choice.cast)
print(json.dumps({
    "bytes": stage.nbytes(),
    "resting": memory("VmRSS") - before,
    "peak": memory("VmHWM") - before,
}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random Llama of 400 MB in bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    yield random_llama(folder, megabytes=400)
    for file in folder.iterdir():  # pytest keeps folders of three runs
        file.unlink()


def check(path: Path, layers: int, stages: int, dtype: str) -> None:
    for index in range(stages):
        start, stop = index * layers // stages, (index + 1) * layers // stages
        done = subprocess.run(
            [sys.executable, "-c", CHILD, path, str(start), str(stop), dtype],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        grown = json.loads(done.stdout)
        limit = FACTOR * grown["bytes"] + FIXED
        facts = f"stage {index} of {stages} in {dtype}: {grown}, at most {limit:.0f}"
        assert grown["resting"] <= limit, facts
        assert grown["peak"] <= limit, facts
        assert grown["peak"] >= 0.9 * grown["bytes"], f"nothing was measured: {facts}"


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_real_model(demo_model: Path, stages: int, dtype: str) -> None:
    """Each stage of SmolLM2 grows by its own tensors, at rest and at the peak."""
    check(demo_model, 30, stages, dtype)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("dtype", ["checkpoint", "float32", "float16"])
def test_a_large_checkpoint(large: Path, stages: int, dtype: str) -> None:
    """So does each stage of a checkpoint of 400 MB, cast or not."""
    check(large, 8, stages, dtype)
