"""What ranks really load and cache, against the plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.engine.slot import Request, prompt_work
from mlxcel.errors import MemoryBudgetError
from mlxcel.family import Family
from mlxcel.family.caches import rank_kind, worker_kind
from mlxcel.partition.cache_bytes import Workload, cache_bytes
from mlxcel.partition.memory import MemoryLimits
from mlxcel.partition.plan import Plan, make_plan
from mlxcel.plugins import Plugins
from mlxcel.stage.load import load_stage
from mlxcel.stage.rank_caches import RankCaches
from mlxcel.tensor.options import TensorParallel
from mlxcel.testing.split import Chain
from mlxcel.testing.tiny import names

NAMES = tuple(name for name in names() if name != "llama_untied_headless")  # it cannot load
PACKED = ("llama4", "gemma4_moe", "gpt_oss", "jamba", "kimi_k3", "nemotron_h", "qwen3_next")
TOLERANCE = 0.001
SHARED_OUT = TensorParallel(2, "within_expert", "vocab_parallel", "vocab_parallel")

Planned = Callable[..., Plan]


@pytest.fixture
def planned(plugins: Plugins, family_of: Callable[[Path], Family]) -> Planned:
    def make(path: Path, tensor: TensorParallel, *, apart: bool = True, **how: Any) -> Plan:
        family, dtype = family_of(path), how.pop("dtype", None)
        return make_plan(
            family.open(path),
            family,
            DtypeChoice(dtype, ""),
            plugins,
            tensor=tensor,
            apart=apart,
            **how,
        )

    return make


def loaded(path: Path, family: Family, tensor: TensorParallel, ranks: range, **how: Any) -> int:
    """The bytes that those ``ranks`` of a single stage hold once they have loaded."""
    checkpoint = family.open(path)
    layers, cast = checkpoint.config.num_layers, how.pop("dtype", None)
    stage = load_stage(checkpoint, family, 0, layers, cast, tensor=tensor, ranks=ranks, **how)
    return stage.nbytes()


@pytest.mark.parametrize(
    ("name", "quantize"),
    [(name, None) for name in NAMES] + [(name, "4:32") for name in PACKED],
)
def test_bytes_of_a_rank(
    name: str,
    quantize: str | None,
    planned: Planned,
    tiny: Callable[..., Path],
    family_of: Callable[[Path], Family],
) -> None:
    """The first rank holds what the plan says, the other one no more."""
    path, tensor = tiny(name, quantize=quantize), TensorParallel(2)
    expected = planned(path, tensor).stages[0].estimated_memory_bytes
    found = [loaded(path, family_of(path), tensor, range(rank, rank + 1)) for rank in range(2)]
    assert found[0] == pytest.approx(expected, rel=TOLERANCE)
    assert found[1] <= found[0]


@pytest.mark.parametrize("name", ["llama_tied", "deepseek_v3", "qwen3_5_moe"])
@pytest.mark.parametrize("tensor", [TensorParallel(2), SHARED_OUT])
@pytest.mark.parametrize("how", [{}, {"dequantize": True, "dtype": "float32"}])
def test_bytes_of_a_worker(
    name: str,
    tensor: TensorParallel,
    how: dict[str, Any],
    planned: Planned,
    tiny: Callable[..., Path],
    family_of: Callable[[Path], Family],
) -> None:
    """A worker that is all ranks holds what is replicated once; either way modes count."""
    path = tiny(name, quantize="4:32")
    for apart, ranks in ((True, range(1)), (False, range(2))):
        expected = planned(path, tensor, apart=apart, **how).stages[0].estimated_memory_bytes
        found = loaded(path, family_of(path), tensor, ranks, **how)
        assert found == pytest.approx(expected, rel=TOLERANCE)


def test_repeated_heads_count_for_each_rank(
    planned: Planned, tiny: Callable[..., Path], family_of: Callable[[Path], Family]
) -> None:
    """Four ranks have two heads of keys twice, also within one worker."""
    path, tensor = tiny("llama"), TensorParallel(4)
    plan = planned(path, tensor, apart=False)
    found = loaded(path, family_of(path), tensor, range(4))
    assert found == pytest.approx(plan.stages[0].estimated_memory_bytes, rel=TOLERANCE)
    assert found > planned(path, TensorParallel(2), apart=False).stages[0].estimated_memory_bytes


@pytest.mark.parametrize("name", NAMES)
def test_caches_of_a_rank(
    name: str, tiny: Callable[..., Path], family_of: Callable[[Path], Family]
) -> None:
    """No rank's cache takes more bytes than planned, nor do those of all ranks in one worker."""
    path, ranks, length = tiny(name), 2, 40
    family = family_of(path)
    config = family.open(path).config
    chain = Chain(path, family, [range(config.num_layers)], tensor=TensorParallel(ranks))
    request = Request(0, tuple(range(1, length + 1)), 1)
    for work in prompt_work(0, [request], 512, itertools.count(1)):
        chain.run(0, work)
    for kind, cache in zip(family.caches(config), chain.tables[0][0].caches, strict=True):
        if cache is None:
            continue
        each = cache.each if isinstance(cache, RankCaches) else [cache]
        most = cache_bytes(rank_kind(kind, ranks), 1, length, itemsize=4)
        assert all(own.nbytes <= most for own in each)
        own = worker_kind(kind, ranks, ranks)
        assert cache.nbytes <= cache_bytes(own, 1, length, itemsize=4)


def test_limits_are_of_one_rank(planned: Planned, tiny: Callable[..., Path]) -> None:
    """Where ranks are apart, what one holds counts against the memory, caches included."""
    path, workload = tiny("llama"), Workload(context=100)
    whole = planned(path, TensorParallel(1), workload=workload).stages[0]
    rank = planned(path, TensorParallel(2), workload=workload).stages[0]
    assert rank.kv_bytes == whole.kv_bytes // 2
    assert rank.total_bytes < whole.total_bytes
    limits = MemoryLimits((rank.total_bytes,))
    planned(path, TensorParallel(2), workload=workload, limits=limits)
    with pytest.raises(MemoryBudgetError):
        planned(path, TensorParallel(2), workload=workload, limits=limits, apart=False)
    together = planned(path, TensorParallel(2), workload=workload, apart=False).stages[0]
    assert together.kv_bytes == whole.kv_bytes


def test_stages_are_balanced_by_ranks(planned: Planned, tiny: Callable[..., Path]) -> None:
    """With a shared-out table a rank's first layers weigh more in proportion; bytes add up."""
    path = tiny("llama")
    whole = planned(path, SHARED_OUT).stages[0].estimated_memory_bytes
    stages = planned(path, SHARED_OUT, size=3).stages
    assert sum(stage.estimated_memory_bytes for stage in stages) == whole
