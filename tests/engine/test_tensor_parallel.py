"""Stages that are several ranks each, under the engine: the same tokens as one process makes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxcel.engine.engine import Settings
from mlxcel.engine.generation import Generation
from mlxcel.engine.kv_grid import PpTpCoord, grid_of
from mlxcel.engine.limits import Limits
from mlxcel.engine.local import kv_budgets, open_model, running
from mlxcel.engine.model import Model
from mlxcel.engine.sequence import Output
from mlxcel.engine.service import Service, kv_managers
from mlxcel.engine.slot import Request
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import TensorParallel
from mlxcel.testing.quick import quick

WAIT = 60.0
PLACES = 6
"""Sequences that the cache budget of the tests has room for at once."""


class Clients:
    """Many who ask one service at once; some go away after their first token."""

    def __init__(self, model: Model, limits: Limits, *budgets: int) -> None:
        self.made: dict[int, list[int]] = {}
        self.ends: dict[int, Output] = {}
        self.leaving: set[int] = set()
        self._left = 0
        self._done = threading.Event()
        self.service = Service(
            model,
            partial(running, model, timeout=WAIT),
            Settings(limits),
            budgets or [None] * len(model.worker_specs),
            self._hear,
            on_end=self._done.set,
        )
        self.service.start()
        self.service._loader.join(WAIT)

    def ask(self, requests: Sequence[Request]) -> None:
        """Ask everything at once, and wait until everybody has an answer or has left."""
        self._left = len(requests)
        self._done.clear()
        for request in requests:
            self.service.submit_all([request])
        assert self._done.wait(WAIT)
        assert self.service.error is None

    def _hear(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.made.setdefault(output.request, []).extend(output.tokens)
            if output.finish_reason is not None:
                self.ends[output.request] = output
                self._left -= 1
            elif output.request in self.leaving:
                self.service.cancel(output.request)
        if self._left == 0:
            self._done.set()


def alone(folder: Path, requests: Sequence[Request], **options: Any) -> dict[int, list[int]]:
    """What each request gets from the whole model in one stage, without anybody beside it."""
    model = open_model(folder, Plugins.discover(), **options)
    made: dict[int, list[int]] = {}
    with running(model, credits=4, timeout=WAIT) as pipeline:
        for request in requests:
            run = Generation(pipeline, [request], end_tokens=(), rows=1, chunk=512)
            made[request.index] = [event.token for event in run if event.token is not None]
    return made


def drawn(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(250) for _ in range(length))


FAMILIES = ("llama", "gemma4", "qwen3_5", "jamba", "deepseek_v3", "mixtral")


@pytest.mark.parametrize("name", quick(FAMILIES, ("llama", "jamba")))
def test_many_streams_over_stages_and_ranks(tiny: Callable[..., Path], name: str) -> None:
    """Two stages of two ranks, ragged prompts, known beginnings, a tight budget, cancels."""
    rng = random.Random(name)
    model = open_model(tiny(name), Plugins.discover(), size=2, tensor=TensorParallel(2))
    limits = Limits(parallel=16, batch=8, chunk=16)
    stages = kv_managers(model, Settings(limits), [None, None])
    clients = Clients(model, limits, *(PLACES * stage.bytes_of(1, 80) for stage in stages))
    known = [drawn(rng, 24), drawn(rng, 30)]
    first = [Request(i, prompt, 6, ignore_end=True) for i, prompt in enumerate(known, start=1)]
    prompts = [
        (*known[i % 2], *drawn(rng, rng.randint(1, 20)))
        if i % 3
        else drawn(rng, rng.randint(1, 50))
        for i in range(18)
    ]
    many = [
        Request(i, prompt, rng.randint(6, 20), ignore_end=True)
        for i, prompt in enumerate(prompts, start=3)
    ]
    clients.leaving = {5, 11, 17}
    clients.ask(first)
    clients.ask(many)
    clients.service.stop()
    single = alone(tiny(name), [*first, *many])
    for request in (*first, *many):
        made, expected = clients.made[request.index], single[request.index]
        if clients.ends[request.index].finish_reason == "cancelled":
            assert made == expected[: len(made)]
        else:
            assert made == expected
    reasons = {index: end.finish_reason for index, end in clients.ends.items()}
    assert {index for index, reason in reasons.items() if reason == "cancelled"} <= {5, 11, 17}
    assert any(end.cached for end in clients.ends.values()), "some beginnings were known"


MODES = [
    TensorParallel(2, embedding="vocab_parallel", head="vocab_parallel"),
    TensorParallel(2, moe="within_expert"),
    TensorParallel(4),
]


@pytest.mark.parametrize("tensor", MODES, ids=str)
def test_modes_and_other_sizes(tiny: Callable[..., Path], tensor: TensorParallel) -> None:
    """Whatever is shared out, and to how many: the tokens stay those of one process."""
    folder = tiny("qwen3_moe")
    model = open_model(folder, Plugins.discover(), tensor=tensor)
    rng = random.Random(0)
    requests = [Request(i, drawn(rng, 5 * i), 8, ignore_end=True) for i in range(1, 5)]
    clients = Clients(model, Limits(chunk=16))
    clients.ask(requests)
    clients.service.stop()
    assert clients.made == alone(folder, requests)


def test_a_worker_has_all_its_ranks_or_is_one(tiny: Callable[..., Path]) -> None:
    """Ranks of one worker share its budget; ranks that are workers have one each."""
    tensor = TensorParallel(2)
    path, plugins, settings = tiny("llama"), Plugins.discover(), Settings()
    whole = open_model(path, plugins, size=2)
    inline = open_model(path, plugins, size=2, tensor=tensor)
    apart = open_model(path, plugins, size=2, tensor=tensor, apart=True)
    assert kv_budgets(inline, 7) == [7] * 2
    assert kv_budgets(apart, 7) == [7] * 4
    grids = [
        grid_of(kv_managers(model, settings, kv_budgets(model, 1 << 30)))
        for model in (whole, inline, apart)
    ]
    assert list(grids[1]) == [PpTpCoord(0), PpTpCoord(1)]
    assert list(grids[2]) == [PpTpCoord(stage, rank) for stage in (0, 1) for rank in (0, 1)]
    sizes = [[one.bytes_of(3, 100) for one in grid.values()] for grid in grids]
    assert sizes[0] == sizes[1] == [2 * size for size in sizes[2][::2]]
    assert sizes[2][::2] == sizes[2][1::2]


def test_states_say_how_many_share_a_stage(tiny: Callable[..., Path]) -> None:
    """Health and the status page have one state a stage, with its number of ranks."""
    model = open_model(tiny("llama"), Plugins.discover(), size=2, tensor=TensorParallel(2))
    clients = Clients(model, Limits())
    assert [(state.stage, state.ranks) for state in clients.service.stages] == [(0, 2), (1, 2)]
    assert all(state.bytes_done == state.bytes_total > 0 for state in clients.service.stages)
    clients.service.stop()


@pytest.mark.parametrize(
    ("ranks", "apart", "line"),
    [
        (1, False, None),
        (2, False, "decode path: native batched forward"),
        (2, True, "decode path: batched forward, a worker for each of 2 ranks"),
    ],
)
def test_the_decode_path_is_said(
    tiny: Callable[..., Path], ranks: int, apart: bool, line: str | None
) -> None:
    """Whoever runs ranks learns how they make tokens, others nothing of it."""
    plugins = Plugins.discover()
    model = open_model(tiny("llama"), plugins, tensor=TensorParallel(ranks), apart=apart)
    found = [notice for notice in model.notices if notice.startswith("decode path")]
    assert found == ([] if line is None else [line])
