"""A model on this machine: opened, planned, run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.engine.generation import Generation
from mlxcel.engine.local import open_model, running
from mlxcel.engine.model import Model
from mlxcel.engine.slot import Request
from mlxcel.errors import CheckpointError, PartitionError, UnsupportedError
from mlxcel.hookspecs import hookimpl
from mlxcel.observe.events import Event, StageLoaded, StageStopped
from mlxcel.pipeline.operations import New, Sampling
from mlxcel.pipeline.step import Step, Tokens
from mlxcel.plugins import Plugins
from mlxcel.stage.contract import StageSpec
from mlxcel.testing.doubles import ScriptedExecutor

Tiny = Callable[..., Path]


class Watcher:
    """A plugin that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @hookimpl
    def mlxcel_observe(self, event: Event) -> None:
        self.events.append(event)


class Scripts:
    """A plugin whose executors take over from the families."""

    def __init__(self, **options: Any) -> None:
        self.built: list[StageSpec] = []
        self._options = options

    @hookimpl
    def mlxcel_build_executor(self, spec: StageSpec) -> ScriptedExecutor:
        self.built.append(spec)
        return ScriptedExecutor(spec, **self._options)


@pytest.fixture
def own_plugins() -> Plugins:
    """The installed plugins, to which a test may add its own."""
    return Plugins.discover(environ={})


def stage_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "mlxcel-stage" in thread.name]


def greedy(model: Model, **options: Any) -> list[int | None]:
    with running(model, credits=4, timeout=60, **options) as pipeline:
        request = Request(0, tuple(b"Hello, world!"), 6)
        run = Generation(pipeline, [request], end_tokens=[], rows=1, chunk=5)
        return [event.token for event in run]


def test_specs_follow_the_plan(tiny: Tiny, own_plugins: Plugins) -> None:
    """Each stage is asked for its own layers, all for one family and dtype."""
    model = open_model(tiny("llama"), own_plugins, dtype="bfloat16", layers="0-1,2-5")
    first, last = model.specs
    assert (first.start, first.stop, first.first, first.last) == (0, 2, True, False)
    assert (last.start, last.stop, last.first, last.last) == (2, 6, False, True)
    for index, spec in enumerate(model.specs):
        assert (spec.index, spec.count, spec.family, spec.cast) == (index, 2, "llama", "bfloat16")
        assert spec.checkpoint == tiny("llama")


def test_notices_say_the_dtype(tiny: Tiny, own_plugins: Plugins) -> None:
    """Whoever runs a model learns in one line what its activations are."""
    model = open_model(tiny("llama", dtype="bfloat16"), own_plugins, dtype="float32")
    assert [line for line in model.notices if "float32 (stored: bfloat16)" in line]


def test_tokens_of_several_stages(tiny: Tiny, own_plugins: Plugins) -> None:
    """One stage or three, in memory or through the wire format: the same tokens."""
    path = tiny("llama")
    one, three = (open_model(path, own_plugins, size=size) for size in (1, 3))
    expected = greedy(one)
    assert len(expected) == 6
    assert greedy(three) == expected
    assert greedy(three, wire=True) == expected


def test_observers_see_stages_come_and_go(tiny: Tiny, own_plugins: Plugins) -> None:
    """StageLoaded when all are ready, StageStopped at the end, one of each per stage."""
    watcher = Watcher()
    own_plugins.register_default(watcher)
    model = open_model(tiny("llama"), own_plugins, size=2)
    with running(model, credits=2, timeout=60) as pipeline:
        loaded = [event for event in watcher.events if isinstance(event, StageLoaded)]
        assert len(loaded) == len(watcher.events) == 2
        assert [(event.stage, event.layers) for event in loaded] == [(0, (0, 3)), (1, (3, 6))]
        assert [event.bytes for event in loaded] == [stage.bytes for stage in pipeline.loaded]
    stopped = [event for event in watcher.events[2:] if isinstance(event, StageStopped)]
    assert [event.stage for event in stopped] == [0, 1]


def test_a_plugin_builds_the_executors(tiny: Tiny, own_plugins: Plugins) -> None:
    """A plugin's executor comes before the family's own."""
    scripts = Scripts()
    own_plugins.register_default(scripts)
    model = open_model(tiny("llama"), own_plugins, size=2)
    with running(model, credits=2, timeout=60) as pipeline:
        pipeline.submit(Step(0, 0, (New(0, 7, Sampling()),), {"tokens": object()}, sample=True))
        assert pipeline.receive() == Tokens(0, 0, (7000,))
    assert sorted(scripts.built, key=lambda spec: spec.index) == list(model.specs)


def test_nothing_is_left_running(tiny: Tiny, own_plugins: Plugins) -> None:
    """Stages end with the block, however it ends."""
    model = open_model(tiny("llama"), own_plugins, size=3)
    with running(model, credits=2, timeout=60):
        assert len(stage_threads()) == 3
    assert stage_threads() == []
    with pytest.raises(ZeroDivisionError), running(model, credits=2, timeout=60):
        raise ZeroDivisionError
    assert stage_threads() == []


def test_what_went_wrong_first_is_told(
    tiny: Tiny, own_plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that still hangs when the block has failed does not hide the failure."""
    monkeypatch.setattr("mlxcel.pipeline.workers.GIVE_UP_SECONDS", 0.05)
    gate = threading.Event()
    own_plugins.register_default(Scripts(on_step=lambda step: gate.wait()))
    model = open_model(tiny("llama"), own_plugins)

    def interrupted() -> None:
        with running(model, credits=2, timeout=60) as pipeline:
            pipeline.submit(Step(0, 0, (), {"tokens": object()}))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    gate.set()
    for thread in threading.enumerate():
        if "mlxcel-stage" in thread.name:
            thread.join(60)
    assert stage_threads() == []


def test_a_stage_that_cannot_load(tiny: Tiny, own_plugins: Plugins) -> None:
    """The block is never entered, the error is the stage's own, and nothing is left running."""
    error = CheckpointError(Path("model.safetensors"), "is broken.", "Get it again.")

    def fail() -> None:
        raise error

    own_plugins.register_default(Scripts(on_load=fail))
    model = open_model(tiny("llama"), own_plugins, size=2)
    with pytest.raises(CheckpointError) as caught, running(model, credits=2, timeout=60):
        pytest.fail("entered")
    assert caught.value is error
    assert stage_threads() == []


def test_progress_comes_from_every_stage(tiny: Tiny, own_plugins: Plugins) -> None:
    """Each stage reports its bytes until all of them are there."""
    seen: dict[int, tuple[int, int]] = {}
    model = open_model(tiny("llama"), own_plugins, size=2)

    def note(stage: int, done: int, total: int) -> None:
        seen[stage] = (done, total)

    with running(model, credits=2, timeout=60, on_progress=note) as pipeline:
        assert seen == {done.stage: (done.bytes, done.bytes) for done in pipeline.loaded}


def test_a_family_that_cannot_run(site: Any, tiny: Tiny, tmp_path: Path) -> None:
    """A family that can only be planned is refused by name, before anything loads."""
    site.family("llama")
    with (site.path / "fake_family_llama.py").open("a") as module:
        module.write("plugin.runnable = False\n")
    plugins = Plugins.discover(environ={}, entry_points=site.entry_points())
    with pytest.raises(UnsupportedError, match="'llama' can be planned but not run"):
        open_model(tiny("llama"), plugins)


def test_no_family_for_it(tiny: Tiny) -> None:
    """Without its family a checkpoint is refused with the package to install."""
    with pytest.raises(UnsupportedError, match="pip install mlxcel-family-llama"):
        open_model(tiny("llama"), Plugins([]))


def test_impossible_stages(tiny: Tiny, own_plugins: Plugins) -> None:
    """More stages than layers are refused before anything loads."""
    with pytest.raises(PartitionError, match="7 stages"):
        open_model(tiny("llama"), own_plugins, size=7)
