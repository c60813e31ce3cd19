"""Ranks that are workers of their own: each runs its share, and collectives add up the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import mlx.core as mx
import pytest

from mlxcel.engine.slot import Request, Work, prompt_work, token_tensor
from mlxcel.family import Family
from mlxcel.pipeline.step import Step
from mlxcel.stage.contract import StageSpec
from mlxcel.stage.executor import FamilyExecutor
from mlxcel.tensor.options import TensorParallel
from mlxcel.testing.split import Chain, Scene, differences, every_cut, one_stage
from mlxcel.testing.thread_collectives import ThreadCollectives

T = TypeVar("T")
Tiny = Callable[..., Path]
FamilyOf = Callable[[Path], Family]

TOLERANCE = 1e-3
RAGGED = Scene((17, 5, 11), chunk=8, steps=4)
EVEN = Scene((11, 11), steps=4)
SHARED_OUT = TensorParallel(
    2, moe="within_expert", embedding="vocab_parallel", head="vocab_parallel"
)


class Threads:
    """One thread for each rank, as MLX's arrays and streams want it."""

    def __init__(self, size: int) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]

    def each(self, call: Callable[[int], T]) -> list[T]:
        """What ``call`` of each rank returns, all at once."""
        futures: list[Future[T]] = [
            thread.submit(call, rank) for rank, thread in enumerate(self._threads)
        ]
        return [future.result(60) for future in futures]

    def close(self) -> None:
        self.each(lambda _: mx.clear_streams())
        for thread in self._threads:
            thread.shutdown()


class Stage:
    """One stage with an executor for each of its ranks, as workers would have it."""

    def __init__(self, spec: StageSpec, family: Family) -> None:
        group = ThreadCollectives.group(spec.tensor.size)
        self.threads = Threads(spec.tensor.size)
        self.executors = self.threads.each(
            lambda rank: FamilyExecutor(attrs.evolve(spec, rank=rank), family, group[rank])
        )
        self.bytes = self.threads.each(
            lambda rank: self.executors[rank].load(lambda done, total: None)
        )

    def run(self, steps: Sequence[Step]) -> list[Any]:
        """One step for each rank: what each makes of its own."""
        return self.threads.each(lambda rank: self.executors[rank].run(steps[rank]))

    def close(self) -> None:
        self.threads.each(lambda rank: self.executors[rank].close())
        self.threads.close()


class Ranks:
    """A :class:`mlxcel.testing.split.Model` whose ranks are threads, each with its own chain."""

    def __init__(self, path: Path, family: Family, tensor: TensorParallel) -> None:
        group = ThreadCollectives.group(tensor.size)
        ranges = [range(family.open(path).config.num_layers)]
        self.threads = Threads(tensor.size)
        self.chains = self.threads.each(
            lambda rank: Chain(path, family, ranges, tensor=tensor, collectives=group[rank])
        )

    def run(self, handle: int, work: Work) -> mx.array:
        def run(rank: int) -> mx.array:
            logits = self.chains[rank].run(handle, work)
            mx.eval(logits)
            return logits

        logits, *others = self.threads.each(run)
        assert all(mx.array_equal(logits, other).item() for other in others)
        return logits


@contextmanager
def ranks(path: Path, family: Family, tensor: TensorParallel) -> Iterator[Ranks]:
    model = Ranks(path, family, tensor)
    yield model
    model.chains = []
    model.threads.close()


CASES = (
    ("llama", None, TensorParallel(2), RAGGED),
    ("llama", "4:32", TensorParallel(4), RAGGED),
    ("llama", None, SHARED_OUT, RAGGED),
    ("llama_tied", None, SHARED_OUT, RAGGED),
    ("qwen3_moe", None, TensorParallel(2), RAGGED),
    ("qwen3_moe", "4:32", SHARED_OUT, RAGGED),
    ("deepseek_v3", None, TensorParallel(4), RAGGED),
    ("gpt_oss_plain", None, TensorParallel(2), RAGGED),
    ("gemma4", None, SHARED_OUT, RAGGED),
    ("qwen3_next", None, TensorParallel(2), RAGGED),
    ("nemotron_h", None, TensorParallel(2), RAGGED),
    ("jamba", None, SHARED_OUT, EVEN),
)


@pytest.mark.parametrize(("name", "quantize", "tensor", "scene"), CASES)
def test_logits(
    tiny: Tiny,
    family_of: FamilyOf,
    name: str,
    quantize: str | None,
    tensor: TensorParallel,
    scene: Scene,
) -> None:
    """Every rank has the whole model's logits, the same bits as the others."""
    path = tiny(name, quantize=quantize)
    family = family_of(path)
    with ranks(path, family, tensor) as split:
        assert list(differences(one_stage(path, family), split, scene, TOLERANCE)) == []


@pytest.mark.parametrize(("name", "tensor"), [("llama", TensorParallel(2)), ("gemma4", SHARED_OUT)])
def test_the_executors_of_two_stages(
    tiny: Tiny, family_of: FamilyOf, name: str, tensor: TensorParallel
) -> None:
    """States pass between equal ranks; of the last stage only the first rank draws."""
    path = tiny(name)
    family, prompt = family_of(path), Request(7, tuple(b"Hello, world!"), 4)
    cut = every_cut(path, family)[-1].start
    layers = family.open(path).config.num_layers
    first, last = (
        Stage(StageSpec(path, name, index, 2, start, stop, tensor=tensor), family)
        for index, (start, stop) in enumerate([(0, cut), (cut, layers)])
    )
    whole = one_stage(path, family)
    work = deque(prompt_work(0, [prompt], 8, iter(range(1, 9))))
    for seq in range(6):
        now = work.popleft()
        logits = whole.run(0, now)
        step = Step(seq, 0, now.operations, {"tokens": token_tensor(now.tokens)}, now.sample)
        leader, follower = last.run(first.run([step] * 2))
        assert follower.tokens == ()
        if now.sample:
            token = int(mx.argmax(logits[0, -1]).item())
            assert leader.tokens == (token,)
            work.append(Work((), [[token]], sample=True))
    first.close()
    last.close()
