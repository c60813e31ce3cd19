"""Reserved bytes against the bytes that real caches take, after every single step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlxcel.engine.engine import Settings
from mlxcel.engine.limits import Limits
from mlxcel.engine.local import open_model
from mlxcel.engine.scheduler import Scheduler
from mlxcel.engine.sequence import Sequence
from mlxcel.engine.service import kv_managers
from mlxcel.engine.slot import Request
from mlxcel.engine.stop_strings import StopStrings
from mlxcel.family import Family
from mlxcel.pipeline.step import Step, Tokens
from mlxcel.plugins import Plugins
from mlxcel.stage.executor import FamilyExecutor
from mlxcel.tensor.options import TensorParallel
from mlxcel.testing.quick import quick

STAGES = 2


def held(executor: FamilyExecutor) -> int:
    """The bytes of all caches on a stage."""
    table = executor._table
    assert table is not None
    return sum(
        cache.nbytes
        for batch in table._batches.values()
        for cache in batch.caches
        if cache is not None
    )


@pytest.mark.parametrize(
    ("name", "ranks"),
    quick(
        [
            *((name, 1) for name in ("llama", "llama_sliding", "gemma4", "qwen3_5", "jamba")),
            *((name, 1) for name in ("deepseek_v3", "llama4")),
            *((name, 2) for name in ("llama", "gemma4", "qwen3_5", "jamba", "deepseek_v3")),
        ],
        [("llama_sliding", 1), ("gemma4", 1), ("qwen3_5", 2)],
    ),
)
def test_caches_never_exceed_what_is_reserved(
    tiny: Callable[..., Path], name: str, ranks: int
) -> None:
    """On every stage, after every step of a busy run with cancels, nbytes <= reserved."""
    folder = tiny(name)
    # Closing an executor gives up its thread's streams, so it gets a thread of its own.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(busy_run, folder, ranks, random.Random(name)).result()


def busy_run(folder: Path, ranks: int, rng: random.Random) -> None:
    """Sequences come and go over two stages in this thread; every step is followed by a check."""
    plugins = Plugins.discover()
    model = open_model(folder, plugins, size=STAGES, tensor=TensorParallel(ranks))
    family = plugins.load("family", model.family)
    assert isinstance(family, Family)
    limits = Limits(parallel=8, batch=4, chunk=16)
    managers = kv_managers(model, Settings(limits), [None] * STAGES)
    executors = []
    for spec in model.specs:
        executors.append(FamilyExecutor(spec, family))
        executors[-1].load(lambda done, total: None)
    scheduler = Scheduler(STAGES, managers, (), limits)
    queues: list[deque[Step | Tokens]] = [deque() for _ in range(STAGES + 1)]
    waiting = [
        Request(i, tuple(rng.randrange(250) for _ in range(rng.randint(1, 60))), rng.randint(1, 25))
        for i in range(24)
    ]
    try:
        while waiting or not scheduler.idle:
            if waiting and rng.random() < 0.3:
                scheduler.add(Sequence(waiting.pop(), None, StopStrings(())))
            if rng.random() < 0.02:
                scheduler.cancel(rng.randrange(24))
            # What this round's operations give back is still there until a stage runs them.
            before = [manager.used for manager in managers]
            queues[0].extend(scheduler.steps())
            for stage, executor in enumerate(executors):
                while queues[stage]:
                    step = queues[stage].popleft()
                    assert isinstance(step, Step)
                    queues[stage + 1].append(executor.run(step))
                assert held(executor) <= max(before[stage], managers[stage].used)
            while queues[-1]:
                answer = queues[-1].popleft()
                assert isinstance(answer, Tokens)
                scheduler.take(answer)
        assert [manager.used for manager in managers] == [0] * STAGES
        assert [held(executor) for executor in executors] == [0] * STAGES
    finally:
        for executor in executors:
            executor.close()
