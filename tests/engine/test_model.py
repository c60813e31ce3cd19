"""A planned model: what its workers are asked to be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.engine.local import open_model
from mlxcel.engine.model import Machine, plan_model
from mlxcel.errors import MemoryBudgetError, TensorParallelError
from mlxcel.family.caches import CacheGroup, KVCacheKind
from mlxcel.partition.memory import MemoryLimits
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import TensorParallel

KIND = KVCacheKind(2, 32, 32)


def test_ranks_within_a_worker(tiny: Callable[..., Path], plugins: Plugins) -> None:
    """There is a worker for each stage, which is told how many ranks it is."""
    model = open_model(tiny("llama"), plugins, size=2, tensor=TensorParallel(2))
    assert model.worker_specs == model.specs
    assert [(spec.index, spec.rank, len(spec.ranks)) for spec in model.specs] == [
        (0, None, 2),
        (1, None, 2),
    ]
    assert model.cache_kinds == (KIND,) * 6
    assert model.worker_cache_kinds == (CacheGroup((KVCacheKind(1, 32, 32),) * 2),) * 6


def test_ranks_apart(tiny: Callable[..., Path], plugins: Plugins) -> None:
    """There is a worker for each rank, stage after stage, with the caches of its heads."""
    model = open_model(tiny("llama"), plugins, size=2, tensor=TensorParallel(2), apart=True)
    assert [(spec.index, spec.rank) for spec in model.worker_specs] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert [spec.rank for spec in model.specs] == [None, None]
    assert model.worker_cache_kinds == model.rank_cache_kinds == (KVCacheKind(1, 32, 32),) * 6


def test_impossible_ranks(tiny: Callable[..., Path], plugins: Plugins) -> None:
    """A model that so many ranks cannot share is refused before it loads."""
    with pytest.raises(TensorParallelError, match="Legal sizes: 1, 2, 4"):
        open_model(tiny("llama"), plugins, tensor=TensorParallel(8))


def test_too_large_unpacked_and_indivisible_packed(
    tiny: Callable[..., Path], plugins: Plugins
) -> None:
    """Where ranks could share only unpacked weights, and these do not fit, memory is what lacks."""
    path = tiny("jamba", quantize="4:32")
    machine = Machine("cpu", fast_blas=True, memory=1 << 40)
    with pytest.raises(MemoryBudgetError):
        plan_model(
            path,
            plugins,
            machine,
            tensor=TensorParallel(4),
            apart=True,
            limits=MemoryLimits((1000,)),
        )


@pytest.mark.parametrize("found", [("n_positions", 96), ("model_max_length", 64), (None, None)])
def test_the_context_by_its_other_names(
    tiny: Callable[..., Path],
    plugins: Plugins,
    tmp_path: Path,
    found: tuple[str | None, int | None],
) -> None:
    """A model that was made for so many tokens says so, whatever its config.json calls them."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert open_model(folder, plugins).context_size == config.pop("max_position_embeddings") == 512
    key, size = found
    config |= {} if key is None else {key: size}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_model(folder, plugins).context_size == size


@pytest.mark.parametrize(
    ("scaling", "size"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "linear", "factor": 4.0}, 512),
    ],
)
def test_the_context_with_scaled_positions(
    tiny: Callable[..., Path],
    plugins: Plugins,
    tmp_path: Path,
    scaling: dict[str, Any],
    size: int,
) -> None:
    """YaRN may be added to a config.json that names the length from before it, or after it."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    assert open_model(folder, plugins).context_size == size
