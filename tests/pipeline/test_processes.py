"""A pipeline of real processes: the same answers, and failures that name who and why."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel.engine.generation import Generation
from mlxcel.engine.local import Workers, open_model, running
from mlxcel.engine.model import Model
from mlxcel.engine.slot import Request, credits_for
from mlxcel.errors import WorkerDied, WorkerFailed, WorkerMismatch, WorkerSilent
from mlxcel.pipeline.processes import ProcessPipeline
from mlxcel.pipeline.report import Hello, Software
from mlxcel.plugins import Plugins

Tiny = Callable[..., Path]

REQUESTS = [
    Request(i, tuple((13 * i + 7 * j) % 250 for j in range(n)), 6)
    for i, n in enumerate((17, 5, 11, 1))
]


def tokens(model: Model, workers: Workers, rows: int = 2) -> dict[int, list[int | None]]:
    """The greedy tokens of REQUESTS."""
    stages = len(model.plan.stages)
    made: dict[int, list[int | None]] = {request.index: [] for request in REQUESTS}
    with running(
        model, credits=credits_for(4, stages, rows), timeout=120, workers=workers
    ) as pipeline:
        for token in Generation(pipeline, REQUESTS, end_tokens=(), rows=rows, chunk=8):
            made[token.index].append(token.token)
    return made


def loaded(model: Model) -> ProcessPipeline:
    pipeline = ProcessPipeline(model.specs, credits=4, timeout=120)
    pipeline.start()
    return pipeline


def gone(pid: int) -> bool:
    """Whether no process has this id any more, reaped included."""
    return not Path(f"/proc/{pid}").exists()


REST = ("qwen3_5", "deepseek_v3", "jamba", "llama4")


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        ("llama", None),
        ("gemma4", "4:32"),
        *(pytest.param(n, q, marks=pytest.mark.slow) for n in REST for q in (None, "4:32")),
    ],
)
def test_processes_make_the_tokens_of_threads(tiny: Tiny, name: str, quantize: str | None) -> None:
    """Two worker processes give the tokens of one stage in a thread, same batches."""
    folder = tiny(name, quantize=quantize)
    whole = open_model(folder, Plugins.discover())
    split = open_model(folder, Plugins.discover(), size=2)
    assert tokens(split, "process") == tokens(whole, "thread")


def test_one_stage_can_be_a_process(tiny: Tiny) -> None:
    """A single worker process is a pipeline too."""
    model = open_model(tiny("llama"), Plugins.discover())
    assert tokens(model, "process") == tokens(model, "thread")


def test_a_killed_worker_is_named(tiny: Tiny) -> None:
    """A worker that is killed ends the run with an error that names stage, process and signal."""
    pipeline = loaded(open_model(tiny("llama"), Plugins.discover(), size=2))
    pids = [worker.process.pid for worker in pipeline._workers]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"stage 1 \(process {pids[1]}\) died.*SIGKILL"):
        pipeline.receive()
    pipeline.stop(drain=False)
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("phase", ["loading", "ready"])
def test_a_stopped_worker_is_named(tiny: Tiny, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stands still (SIGSTOP) is named with stage and process after the grace."""
    # It may be stopped before it has said hello.
    monkeypatch.setattr("mlxcel.pipeline.processes.STARTING_SECONDS", 5.0)
    specs = open_model(tiny("llama"), Plugins.discover(), size=2).specs
    pipeline = ProcessPipeline(specs, credits=4, timeout=120, grace=1.5)

    def stop_one(*_: int) -> None:
        os.kill(pipeline._workers[1].process.pid, signal.SIGSTOP)

    def run() -> None:
        pipeline.start(*[stop_one] if phase == "loading" else [])
        stop_one()
        pipeline.receive()

    with pytest.raises(WorkerSilent, match=r"stage 1 \(process \d+\) has given no sign of life"):
        run()
    pids = [worker.process.pid for worker in pipeline._workers]
    pipeline.stop(drain=False)
    assert all(gone(pid) for pid in pids)


def test_a_stopped_worker_does_not_outlive_the_pipeline(tiny: Tiny) -> None:
    """Even a worker that hangs (SIGSTOP) is gone after the pipeline has given up."""
    pipeline = loaded(open_model(tiny("llama"), Plugins.discover(), size=2))
    pids = [worker.process.pid for worker in pipeline._workers]
    os.kill(pids[0], signal.SIGSTOP)
    pipeline.stop(drain=False)
    assert all(gone(pid) for pid in pids)


def test_a_fault_in_a_worker_keeps_its_words(tiny: Tiny, tmp_path: Path) -> None:
    """What goes wrong while a worker loads reaches the caller as the worker's own error."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model = open_model(folder, Plugins.discover(), size=2)
    (folder / "model.safetensors").write_bytes(b"")
    pipeline = ProcessPipeline(model.specs, credits=4, timeout=120)
    with pytest.raises(WorkerFailed, match=r"stage \d: .*model\.safetensors") as caught:
        pipeline.start()
    assert caught.value.kind == "CheckpointError"
    pipeline.stop(drain=False)


def test_workers_with_different_software_are_refused(tiny: Tiny) -> None:
    """The first difference between two workers' software is named with both sides."""
    specs = open_model(tiny("llama"), Plugins.discover(), size=3).specs
    pipeline = ProcessPipeline(specs, credits=4, timeout=10)
    pipeline._greet(specs[0], Hello(1, Software({"mlx": "1", "BLAS": "wheel"})))
    pipeline._greet(specs[1], Hello(2, Software({"mlx": "1", "BLAS": "wheel"})))
    with pytest.raises(WorkerMismatch, match="stage 2 runs with BLAS openblas, the others with wh"):
        pipeline._greet(specs[2], Hello(3, Software({"mlx": "1", "BLAS": "openblas"})))


def test_plugins_left_out_are_left_out_in_the_workers(tiny: Tiny) -> None:
    """--no-plugin reaches the workers: the family they would need is then missing."""
    model = open_model(tiny("llama"), Plugins.discover(), size=2)
    pipeline = ProcessPipeline(model.specs, credits=4, timeout=120, without=["llama"])
    with pytest.raises(WorkerFailed, match="'llama'"):
        pipeline.start()
    pipeline.stop(drain=False)


def test_workers_import_nothing_from_where_they_start(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, such as a checkpoint's, may hold modules; they never run."""
    for name in ("attrs", "mlx", "mlxcel", "random"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('it ran')")
    monkeypatch.chdir(tmp_path)
    model = open_model(tiny("llama"), Plugins.discover(environ={}), size=2)
    assert tokens(model, "process") == tokens(model, "thread")
