"""A rank needs memory for its own share of the tensors, and next to nothing more."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel.testing import random_deepseek, random_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

FACTOR, FIXED = 1.05, 25e6
"""What a rank may grow by: this share of its own bytes, and 25 MB for code and one block."""

LOAD = """
import json, sys
from pathlib import Path

from mlxcel.checkpoint.config import read_config
from mlxcel.family.choose import choose_family
from mlxcel.plugins import Plugins
from mlxcel.stage.load import load_stage
from mlxcel.tensor.options import TensorParallel
from mlxcel.testing.thread_collectives import ThreadCollectives

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

path, rank, size = json.loads(sys.argv[1])
_, family = choose_family(read_config(Path(path)), Plugins.discover())
family.stage_class()
checkpoint = family.open(Path(path))
tensor = TensorParallel(size, embedding="vocab_parallel", head="vocab_parallel")
group = ThreadCollectives.group(size)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to what is resident now
stage = load_stage(
    checkpoint,
    family,
    0,
    checkpoint.config.num_layers,
    None,
    tensor=tensor,
    ranks=range(rank, rank + 1),
    collectives=group[rank],
)
resting, peak = memory("VmRSS") - before, memory("VmHWM") - before
print(json.dumps({"bytes": stage.nbytes(), "resting": resting, "peak": peak}))
"""


def grown(path: Path, rank: int, size: int) -> dict[str, int]:
    """The bytes of one rank's parameters, and what its process has grown by."""
    command = [sys.executable, "-c", LOAD, json.dumps([str(path), rank, size])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random Llama of 400 MB in bfloat16, all of it split."""
    folder = tmp_path_factory.mktemp("ranks")
    yield random_llama(folder, megabytes=400)
    for file in folder.iterdir():  # pytest keeps folders of three runs
        file.unlink()


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random mixture of 400 MB whose experts are stacked when it is loaded."""
    folder = tmp_path_factory.mktemp("experts")
    yield random_deepseek(folder, megabytes=400, layers=4)
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (3, 4)])
def test_a_dense_model(llama: Path, rank: int, size: int) -> None:
    """Only the rank's bytes are read: at the peak there is a block more."""
    found = grown(llama, rank, size)
    assert found["bytes"] <= 1.05 * 400e6 / size
    limit = FACTOR * found["bytes"] + FIXED
    assert 0.9 * found["bytes"] <= found["resting"] <= found["peak"] <= limit, found


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (3, 4)])
def test_experts(experts: Path, rank: int, size: int) -> None:
    """Of stacked experts only the rank's stay; while one stack is put together all are there."""
    found = grown(experts, rank, size)
    stack = 400e6 / 4 / 3  # of a layer's three, which are most of it
    limit = FACTOR * found["bytes"] + FIXED
    assert 0.9 * found["bytes"] <= found["resting"] <= limit, found
    assert found["peak"] <= limit + 2 * stack, found
