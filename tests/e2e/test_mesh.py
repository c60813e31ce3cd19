"""Peers that are the ranks of stages: the same tokens as one process, and who is lost when."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from mlxcel.tensor.options import TensorParallel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

GRACE = 3.0
SECONDS = 40.0
PAIRS = TensorParallel(2)
EVERYTHING = TensorParallel(2, "within_expert", "vocab_parallel", "vocab_parallel")

ENDLESS = {"max_tokens": 100_000, "logit_bias": {"257": -100}}
"""A request that only its length ends."""

UNLIKE = ("llama", "qwen3_moe", "deepseek_v3", "gemma4", "qwen3_5")
"""What differs in what ranks share out, and in what they keep."""


@pytest.fixture(scope="module")
def mesh(make_cluster: Callable[..., Any], models: Path) -> Any:
    """Four peers that compute as this process does."""
    flags = ("--blas", "wheel", "--cluster-heartbeat-grace", str(GRACE))
    return make_cluster([models] * 4, *flags)


@pytest.mark.parametrize("name", UNLIKE)
def test_a_mesh_makes_the_tokens_of_one_process(
    mesh: Any, models: Path, walk: Any, name: str
) -> None:
    """Two stages of two ranks each, every one a peer: token for token what one process makes."""
    folder = models / name
    assert walk.through(mesh, folder, 2, PAIRS) == walk.alone(folder)
