"""The executor that runs a stage with its family."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest

from mlxcel.engine.slot import Request, prompt_work, token_tensor
from mlxcel.errors import CheckpointError
from mlxcel.family import Family
from mlxcel.pipeline.operations import Filter, New, Release, Sampling
from mlxcel.pipeline.step import Step, Tokens
from mlxcel.stage.arrays import to_wire
from mlxcel.stage.contract import StageSpec
from mlxcel.stage.executor import FamilyExecutor
from mlxcel.testing.split import Whole

PROMPT = Request(7, tuple(b"Hello, world!"), 4)


class Stage:
    """An executor in the thread that its calls must come from."""

    def __init__(self, spec: StageSpec, family: Family) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.executor = self.thread.submit(FamilyExecutor, spec, family).result()
        self.bytes = self.thread.submit(self.executor.load, lambda done, total: None).result()

    def run(self, step: Step) -> Any:
        return self.thread.submit(self.executor.run, step).result()

    def requests(self, step: Step) -> tuple[int, ...]:
        return self.thread.submit(self.executor.requests, step).result()

    def close(self) -> None:
        self.thread.submit(self.executor.close).result()
        self.thread.shutdown()


@pytest.fixture
def stages(
    tiny: Callable[..., Path], family_of: Callable[[Path], Family]
) -> Iterator[tuple[Stage, Stage]]:
    """A tiny Llama in two stages."""
    path = tiny("llama")
    specs = [StageSpec(path, "llama", i, 2, 3 * i, 3 * i + 3) for i in range(2)]
    first, last = (Stage(spec, family_of(path)) for spec in specs)
    yield first, last
    first.close()
    last.close()


def steps(request: Request = PROMPT, chunk: int = 512) -> list[Step]:
    """The steps that bring ``request`` into slot 0."""
    work = prompt_work(0, [request], chunk, iter(range(1, 9)))
    return [
        Step(seq, 0, w.operations, {"tokens": token_tensor(w.tokens)}, w.sample)
        for seq, w in enumerate(work)
    ]


def test_greedy_tokens(
    stages: tuple[Stage, Stage], tiny: Callable[..., Path], family_of: Callable[[Path], Family]
) -> None:
    """Two stages, each in its own thread, give the tokens of the whole model."""
    first, last = stages
    whole = Whole(tiny("llama"), family_of(tiny("llama")))
    for work in prompt_work(0, [PROMPT], 512, iter(range(1, 9))):
        logits = whole.run(0, work)
    answers = [last.run(first.run(step)) for step in steps()]
    assert answers == [Tokens(0, 0), Tokens(1, 0, (mx.argmax(logits[0, -1]).item(),))]


def test_what_leaves_a_stage_is_evaluated(stages: tuple[Stage, Stage]) -> None:
    """Another thread may read the hidden states; lazy arrays of this stage's stream would raise."""
    first, _ = stages
    out = first.run(steps()[0])
    assert (out.seq, out.slot, out.operations, out.sample) == (0, 0, steps()[0].operations, False)
    assert out.tensors["h"].shape == (1, len(PROMPT.prompt) - 1, 64)
    sums: list[float] = []
    reader = threading.Thread(target=lambda: sums.append(memoryview(out.tensors["h"]).nbytes))
    reader.start()
    reader.join()
    assert sums == [(len(PROMPT.prompt) - 1) * 64 * 4]


def test_arrays_and_bytes_are_the_same(stages: tuple[Stage, Stage]) -> None:
    """A payload may come as MLX arrays or as the bytes of a wire."""
    first, last = stages
    for step in steps():
        plain = last.run(first.run(step))
    for stage in stages:
        stage.run(Step(2, 0, (Release(0),)))
    for step in steps():
        out = first.run(step)
        tensors = {name: to_wire(value) for name, value in out.tensors.items()}
        wired = last.run(attrs.evolve(out, tensors=tensors))
    assert wired == plain


def test_a_step_without_tensors(stages: tuple[Stage, Stage]) -> None:
    """Only operations: earlier stages pass the step on, the last one answers with no tokens."""
    first, last = stages
    step = Step(0, 0, (New(0, 7, Sampling()),))
    assert first.run(step) == step
    assert last.run(step) == Tokens(0, 0)
    assert first.requests(step) == (7,)


def test_chunks_ask_for_no_tokens(stages: tuple[Stage, Stage]) -> None:
    """Only the step that samples has tokens in its answer."""
    first, last = stages
    answers = [last.run(first.run(step)) for step in steps(chunk=5)]
    assert [len(answer.tokens) for answer in answers] == [0, 0, 0, 1]


def test_lost_requests(stages: tuple[Stage, Stage]) -> None:
    """Lost with a step are the requests of its slot and those that it brings, each once."""
    first, _ = stages
    first.run(Step(0, 0, (New(0, 7, Sampling()),)))
    assert first.requests(Step(1, 0)) == (7,)
    assert first.requests(Step(1, 0, (New(1, 8, Sampling()), New(0, 7, Sampling())))) == (7, 8)
    assert first.requests(Step(1, 5)) == ()


def test_an_operation_that_cannot_be(stages: tuple[Stage, Stage]) -> None:
    """A step for a batch that is not there raises, and the stage goes on."""
    first, _ = stages
    with pytest.raises(KeyError):
        first.run(Step(0, 3, (Filter(3, (0,)),)))
    assert first.run(steps()[0]).tensors["h"].shape == (1, len(PROMPT.prompt) - 1, 64)


def test_load_returns_the_bytes(stages: tuple[Stage, Stage], tiny: Callable[..., Path]) -> None:
    """Together the stages hold the bytes of all tensors of an untied model."""
    weights = mx.load(str(tiny("llama") / "model.safetensors"))
    assert sum(stage.bytes for stage in stages) == sum(value.nbytes for value in weights.values())


def test_close_after_a_failed_load(
    tmp_path: Path, tiny: Callable[..., Path], family_of: Callable[[Path], Family]
) -> None:
    """An executor that could not load can still be closed, and knows of no requests."""
    executor = FamilyExecutor(StageSpec(tmp_path, "llama", 0, 1, 0, 6), family_of(tiny("llama")))

    def work() -> None:
        with pytest.raises(CheckpointError):
            executor.load(lambda done, total: None)
        assert executor.requests(Step(0, 0)) == ()
        executor.close()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()
