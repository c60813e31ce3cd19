"""One process for each rank of each stage: the tokens of the whole model, and nobody hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxcel.engine.generation import Generation
from mlxcel.engine.local import open_model
from mlxcel.engine.model import Model
from mlxcel.engine.slot import Request, credits_for
from mlxcel.errors import RankLinkBroken, WorkerDied, WorkerFailed, WorkerSilent
from mlxcel.pipeline.processes import ProcessPipeline
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import TensorParallel
from mlxcel.testing import tiny as checkpoints
from mlxcel.testing.armed import Armed, ArmedPipeline

Tiny = Callable[..., Path]
MakeSite = Callable[[str], Any]
Tokens = dict[int, list[int | None]]

REQUESTS = [
    Request(i, tuple((13 * i + 7 * j) % 250 for j in range(n)), 5)
    for i, n in enumerate((17, 5, 11, 1))
]
TIMEOUT = 120.0
QUICK = ("llama", "gemma4", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5", "jamba", "llama_tied")
UNFINISHED = ("llama_untied_headless",)
"""Checkpoints that are no models."""

REST = tuple(name for name in checkpoints.names() if name not in (*QUICK, *UNFINISHED))
FOURS = ("deepseek_v3", "glm4_moe", "gpt_oss", "jamba", "kimi_k3", "llama4", "qwen2_moe", "qwen3")
VOCABULARY = {"embedding": "vocab_parallel", "head": "vocab_parallel"}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def armed() -> Iterator[Armed]:
    """Four processes that walk through all the checkpoints of this file."""
    with Armed(4) as processes:
        yield processes


@pytest.fixture(scope="module")
def ringed() -> Iterator[Armed]:
    """Two processes for MLX's own ring, which connects once in a process's life."""
    with Armed(2) as processes:
        yield processes


def opened(folder: Path, stages: int = 1, ranks: int = 1, **modes: Any) -> Model:
    tensor = TensorParallel(ranks, **modes)
    return open_model(folder, Plugins.discover(), size=stages, tensor=tensor, apart=ranks > 1)


def tokens(armed: Armed, model: Model, **options: Any) -> Tokens:
    """The greedy tokens of REQUESTS, in batches of two ragged prompts."""
    stages = len(model.plan.stages)
    credits = credits_for(len(REQUESTS), stages, 2)
    pipeline = ArmedPipeline(armed, model.worker_specs, credits=credits, timeout=TIMEOUT, **options)
    made: Tokens = {request.index: [] for request in REQUESTS}
    try:
        pipeline.start()
        for token in Generation(
            pipeline, REQUESTS, end_tokens=(), rows=2, chunk=8, batching=model.batching
        ):
            made[token.index].append(token.token)
    finally:
        pipeline.stop()
    return made


@pytest.mark.parametrize("quantize", [None, "4:32"])
@pytest.mark.parametrize("name", [*QUICK, *(slow(name) for name in REST)])
def test_two_ranks_make_the_tokens_of_one(
    armed: Armed, tiny: Tiny, name: str, quantize: str | None
) -> None:
    """Two processes that share every layer give the tokens of one that has all of it."""
    folder = tiny(name, quantize=quantize)
    assert tokens(armed, opened(folder, 1, 2)) == tokens(armed, opened(folder))


@pytest.mark.parametrize("name", ["llama", "gemma4", *(slow(name) for name in FOURS)])
def test_four_ranks_make_the_tokens_of_one(armed: Armed, tiny: Tiny, name: str) -> None:
    """Four processes form a ring, where not all have a connection to each other."""
    folder = tiny(name)
    assert tokens(armed, opened(folder, 1, 4)) == tokens(armed, opened(folder))


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", slow("gemma4"), slow("jamba")])
def test_two_stages_of_two_ranks_make_the_tokens_of_one(
    armed: Armed, tiny: Tiny, name: str
) -> None:
    """Hidden states pass between equal ranks; the other modes of sharing are shared too."""
    folder = tiny(name)
    mesh = opened(folder, 2, 2, moe="within_expert", **VOCABULARY)
    assert tokens(armed, mesh) == tokens(armed, opened(folder))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", slow("gemma4"), slow("jamba")])
def test_ranks_in_the_ring_of_mlx_make_the_tokens_of_one(
    armed: Armed, ringed: Armed, tiny: Tiny, name: str
) -> None:
    """Over mx.distributed, where collectives are lazy, two processes give the same tokens."""
    folder = tiny(name)
    shared = tokens(ringed, opened(folder, 1, 2), collectives="ring")
    assert shared == tokens(armed, opened(folder))


def test_what_is_loaded_is_told_of_stages_and_of_ranks(armed: Armed, tiny: Tiny) -> None:
    """A stage's bytes are those of its ranks together, each of which holds about its share."""
    model = opened(tiny("llama"), 2, 2)
    pipeline = ArmedPipeline(armed, model.worker_specs, credits=2, timeout=TIMEOUT)
    told: set[tuple[int, int, int]] = set()
    pipeline.start(lambda *progress: told.add(progress))
    pipeline.stop()
    assert [(done.stage, done.rank) for done in pipeline.loaded_ranks] == [
        (0, 0), (0, 1), (1, 0), (1, 1)
    ]  # fmt: skip
    by_rank = [done.bytes for done in pipeline.loaded_ranks]
    assert [done.bytes for done in pipeline.loaded] == [sum(by_rank[:2]), sum(by_rank[2:])]
    assert {(done.stage, done.bytes, done.bytes) for done in pipeline.loaded} <= told


FAULTY = """
import os, signal, time

from mlxcel.plugins import Plugins
from mlxcel.stage.executor import FamilyExecutor


class Faulty(FamilyExecutor):
    def load(self, progress):
        self.fault("loading")
        return super().load(progress)

    def run(self, step):
        if step.seq == 2:
            self.fault("decoding")
        return super().run(step)

    def fault(self, phase):
        if (self.spec.index, self.spec.rank, phase) == ({stage}, {rank}, "{phase}"):
            {statement}


@hookimpl
def mlxcel_build_executor(spec, collectives):
    return Faulty(spec, Plugins.discover().load("family", spec.family), collectives)
"""
KILL, STOP = (f"os.kill(os.getpid(), signal.{name})" for name in ("SIGKILL", "SIGSTOP"))
SLEEP, RAISE = "time.sleep(3600)", "raise RuntimeError('broken on purpose')"


def run_with_a_fault(
    make_site: MakeSite,
    model: Model,
    phase: str,
    statement: str,
    *,
    stage: int = 0,
    rank: int = 1,
    rank_timeout: float = 60.0,
    grace: float = 60.0,
) -> None:
    """Serve a request while one rank executes ``statement``; nobody may be left."""
    site = make_site("site")
    fault = FAULTY.format(phase=phase, statement=statement, stage=stage, rank=rank)
    site.hooks("faulty", fault)
    pipeline = ProcessPipeline(
        model.worker_specs,
        credits=4,
        timeout=TIMEOUT,
        environment={"PYTHONPATH": str(site.path)},
        rank_timeout=rank_timeout,
        grace=grace,
    )
    try:
        pipeline.start()
        for _ in Generation(pipeline, REQUESTS[:1], end_tokens=(), rows=1, chunk=64):
            pass
    finally:
        pids = [worker.process.pid for worker in pipeline._workers]
        pipeline.stop(drain=False)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("phase", [slow("loading"), "decoding"])
def test_a_killed_rank_is_named(make_site: MakeSite, tiny: Tiny, phase: str) -> None:
    """Who is killed is named with rank and stage, though the others see it as lost as well."""
    with pytest.raises(WorkerDied, match=r"^rank 1 of stage 0 \(process \d+\) died.*SIGKILL"):
        run_with_a_fault(make_site, opened(tiny("llama"), 1, 2), phase, KILL)


@pytest.mark.parametrize("phase", [slow("loading"), "decoding"])
def test_a_stopped_rank_is_named(make_site: MakeSite, tiny: Tiny, phase: str) -> None:
    """Who stands still is named with rank and stage after the grace."""
    with pytest.raises(WorkerSilent, match=r"^rank 1 of stage 0 \(process \d+\) has given no"):
        run_with_a_fault(make_site, opened(tiny("llama"), 1, 2), phase, STOP, grace=2.0)


@pytest.mark.parametrize(("rank", "other"), [slow(1, 0), (0, 1)])
def test_a_delayed_rank_is_named(make_site: MakeSite, tiny: Tiny, rank: int, other: int) -> None:
    """Whoever makes the others wait longer than --tp-timeout is named, leader or not."""
    lost = f"^rank {other} of stage 0: rank {rank} of stage 0 is lost in .* within 2 s"
    model = opened(tiny("llama"), 1, 2)
    with pytest.raises(WorkerFailed, match=lost) as caught:
        run_with_a_fault(make_site, model, "decoding", SLEEP, rank=rank, rank_timeout=2.0)
    assert caught.value.kind == "RankLost"


CUT = "self.collectives._group._connections[{other}]._stream._sock.shutdown(2)"


@pytest.mark.parametrize(("ranks", "other"), [(2, 0), slow(4, 2)])
def test_a_connection_that_breaks_is_named(
    make_site: MakeSite, tiny: Tiny, ranks: int, other: int
) -> None:
    """Where only the connection between two ranks is cut, both are named, and no rank is lost."""
    model = opened(tiny("llama"), 1, ranks)
    with pytest.raises(RankLinkBroken) as caught:
        run_with_a_fault(make_site, model, "decoding", CUT.format(other=other))
    assert {caught.value.rank, caught.value.other} == {1, other}
    assert caught.value.how in ("Broken pipe", "it has closed the connection")


@pytest.mark.slow
def test_a_stopped_rank_is_named_by_the_others_first(make_site: MakeSite, tiny: Tiny) -> None:
    """Where --tp-timeout is shorter than the grace, the rank that waits tells."""
    model = opened(tiny("llama"), 1, 2)
    with pytest.raises(WorkerFailed, match=r"rank 1 of stage 0 is lost in .* within 2 s"):
        run_with_a_fault(make_site, model, "decoding", STOP, rank_timeout=2.0)


@pytest.mark.parametrize("phase", [slow("loading"), "decoding"])
def test_a_rank_that_raises_ends_the_group(make_site: MakeSite, tiny: Tiny, phase: str) -> None:
    """The cause is told as the rank itself tells it; what the others see follows from it."""
    broken = "^rank 1 of stage 0: RuntimeError: broken on purpose$"
    with pytest.raises(WorkerFailed, match=broken):
        run_with_a_fault(make_site, opened(tiny("llama"), 1, 2), phase, RAISE)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_of_a_mesh_that_raises_is_named(make_site: MakeSite, tiny: Tiny, stage: int) -> None:
    """Also with two stages the failure is that of the rank that failed."""
    broken = f"^rank 1 of stage {stage}: RuntimeError: broken on purpose$"
    with pytest.raises(WorkerFailed, match=broken):
        run_with_a_fault(make_site, opened(tiny("llama"), 2, 2), "decoding", RAISE, stage=stage)
