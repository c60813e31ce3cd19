"""``mlxcel plan`` as a user runs it."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from mlxcel.cli.main import run
from mlxcel.cli.plan_table import print_table
from mlxcel.engine.local import open_model
from mlxcel.partition.assignment import assign
from mlxcel.partition.profile import LayerProfile, ModelProfile
from mlxcel.plugins import Plugins

STAGE_FIELDS = [
    "stage_index",
    "device_id",
    "layer_range",
    "has_embedding",
    "has_lm_head",
    "estimated_memory_bytes",
    "kv_bytes",
]

PLANNED = """
from mlxcel.family import Family
from mlxcel.family.caches import KVCacheKind
from mlxcel.family.contract import LayerAdjacencyGroup
from mlxcel.family.shapes import embedding, linear, norm

class Planned(Family):
    api_version = "1.0"
    wire_names = ("planned",)
    runnable = False

    def shapes(self, config):
        hidden = config.require("hidden_size")
        yield from embedding("model.embed_tokens", 10, hidden)
        for layer in range(config.num_layers):
            yield from linear(f"model.layers.{layer}.mlp.up_proj", 100, hidden)
        yield from norm("model.norm", hidden)
        yield from linear("lm_head", 10, hidden)

    def caches(self, config):
        return (KVCacheKind(1, 4, 4),) * config.num_layers

    def adjacency(self, config):
        return (LayerAdjacencyGroup(2, 5, "they share keys"),) if config.get("joined") else ()

plugin = Planned()
"""
LAYER, TABLE, NORM = 2 * 100 * 8, 2 * 10 * 8, 2 * 8
"""Bytes of the parts of a planned model with hidden_size 8."""


@attrs.frozen
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def plan(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def ranges(self) -> list[list[int]]:
        return [stage["layer_range"] for stage in self.plan["stages"]]


Command = Callable[..., Done]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command; ``as_json`` with --json."""

    def call(model: Path, *flags: str, as_json: bool = True) -> Done:
        capsys.readouterr()
        code = run(["plan", "-m", str(model), *flags, *(["--json"] if as_json else [])])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def planned(make_site: Any, tmp_path: Path) -> Callable[..., Path]:
    """Makes a config.json without weights, of a family that can be planned but not run."""
    site = make_site("site")
    site.module("fake_planned", PLANNED)
    site.distribution("fake-planned", {"mlxcel.families": {"planned": "fake_planned:plugin"}})

    def make(**settings: Any) -> Path:
        defaults = {"model_type": "planned", "num_hidden_layers": 10, "hidden_size": 8}
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(defaults | settings))
        return tmp_path / "model"

    return make


def test_json(plan: Command, planned: Callable[..., Path]) -> None:
    """The object has exactly the documented fields, and the bytes of its parts."""
    done = plan(planned(joined=True), "--pp-size", "2", "--context", "100", "--sequences", "3")
    assert list(done.plan) == [
        "stages",
        "tensor_parallel_size",
        "tensors",
        "imbalance",
        "warnings",
        "adjacency",
    ]
    assert (done.plan["tensor_parallel_size"], done.plan["tensors"]) == (1, [])
    assert [list(stage) for stage in done.plan["stages"]] == [STAGE_FIELDS] * 2
    first, second = done.plan["stages"]
    assert first == {
        "stage_index": 0,
        "device_id": "local-stage-0",
        "layer_range": [0, 5],
        "has_embedding": True,
        "has_lm_head": False,
        "estimated_memory_bytes": 5 * LAYER + TABLE,
        "kv_bytes": 5 * 3 * (4 + 4) * 2 * (100 + 255),
    }
    assert second["layer_range"] == [5, 10]
    assert second["has_lm_head"]
    assert second["estimated_memory_bytes"] == 5 * LAYER + TABLE + NORM
    assert done.plan["imbalance"] == pytest.approx(1 + NORM / (5 * LAYER + TABLE))
    assert done.plan["warnings"] == []
    assert done.plan["adjacency"] == [{"start": 2, "end": 5, "reason": "they share keys"}]


def test_a_planned_family_does_not_run(
    plan: Command, planned: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """What can only be planned is planned; generate refuses it."""
    model = planned()
    assert plan(model).ranges == [[0, 10]]
    assert run(["generate", "-m", str(model), "-p", "hi"]) == 2
    assert "can be planned but not run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama", "gemma4", "qwen3_5", "deepseek_v3"])
def test_bytes_are_those_that_generate_plans(
    name: str, plan: Command, tiny: Callable[..., Path], plugins: Plugins
) -> None:
    """With weights the plan is exact: it is the one that generate makes."""
    done = plan(tiny(name), "--pp-size", "3", "--dtype", "float32")
    model = open_model(tiny(name), plugins, size=3, dtype="float32")
    assert [stage["estimated_memory_bytes"] for stage in done.plan["stages"]] == [
        stage.estimated_memory_bytes for stage in model.plan.stages
    ]
    assert "bytes: exact, from the headers of" in done.err


def test_the_config_alone_estimates(
    plan: Command, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Naming config.json, or a folder without weights, plans from the settings alone."""
    shutil.copy(tiny("llama") / "config.json", tmp_path)
    flags = ("--pp-size", "3", "--dtype", "float32")
    exact = plan(tiny("llama"), *flags)
    for model in (tiny("llama") / "config.json", tmp_path):
        estimated = plan(model, *flags)
        assert estimated.plan == exact.plan
        assert "bytes: estimated from" in estimated.err
    assert "bytes: exact" in exact.err


def test_the_table(plan: Command, planned: Callable[..., Path]) -> None:
    """A row with a bar per stage, where the bytes come from, and the quality of the plan."""
    flags = ("--pp-size", "2", "--memory", "40KB", "--context", "10")
    done = plan(planned(), *flags, as_json=False)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["stage", "layers", "weights", "KV", "caches", "of", "memory"]
    for stage, holds in enumerate(["embed + 0-4", "5-9 + head"]):
        row = lines[1 + stage]
        assert row.split()[0] == str(stage)
        assert holds in row
        assert ("8.16 KB" if stage == 0 else "8.18 KB") in row
        assert "21.20 KB  40.00 KB  73%" in row
        assert "█" * 4 + "▒" * 9 + "·" * 5 in row
    assert f"bytes: estimated from {planned() / 'config.json'}, without weights" in lines
    assert (
        f"pipeline partition quality: 2 stages, max={5 * LAYER + TABLE + NORM} bytes, "
        f"min={5 * LAYER + TABLE} bytes, imbalance=1.00x"
    ) in lines
    assert any(line.endswith("actual=unknown") for line in lines)


def test_a_table_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the output cannot show blocks, bars are made of other characters."""
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    print_table(assign(ModelProfile((LayerProfile(10, 1, 10),) * 2), [range(2)]), [80])
    sys.stdout.flush()
    assert b"####=====.........\n" in raw.getvalue()


def test_an_uneven_plan_warns(plan: Command, planned: Callable[..., Path]) -> None:
    """From 1.5x on there is a warning, in JSON and under the table; it is no error."""
    done = plan(planned(), "--pp-layers", "0-7,8-9")
    [warning] = done.plan["warnings"]
    assert warning.startswith("pipeline auto-partition produced an imbalanced plan")
    assert warning in plan(planned(), "--pp-layers", "0-7,8-9", as_json=False).out


def test_budgets_move_the_cuts(plan: Command, planned: Callable[..., Path]) -> None:
    """Memory, its reserve and the caches decide where the layers may go."""
    model, memory = planned(), 2 * LAYER + TABLE
    sizes = ("--pp-size", "2", "--memory")
    assert plan(model, *sizes, f"{memory},1GB").ranges == [[0, 2], [2, 10]]
    reserve = ("--reserve", "100")
    assert plan(model, *sizes, f"{memory + 100},1GiB", *reserve).ranges == [[0, 2], [2, 10]]
    assert plan(model, *sizes, f"{memory + 99},1GiB", *reserve).ranges == [[0, 1], [1, 10]]
    roomy = f"{memory + 5000},1GB"
    assert plan(model, *sizes, roomy).ranges == [[0, 5], [5, 10]]
    assert plan(model, *sizes, roomy, "--context", "1").ranges == [[0, 1], [1, 10]]


@pytest.mark.parametrize("by", ["bytes", "time", "time:prefill"])
def test_balance(by: str, plan: Command, planned: Callable[..., Path]) -> None:
    """--pp-balance takes the load that it names."""
    assert plan(planned(), "--pp-size", "5", "--pp-balance", by).ranges[2] == [4, 6]


def test_dequantized_weights(plan: Command, planned: Callable[..., Path]) -> None:
    """--weights dequantized counts 4 bytes a weight."""
    model = planned(hidden_size=64, quantization={"group_size": 64, "bits": 4})
    packed = plan(model, "--dtype", "checkpoint").plan["stages"][0]
    plain = plan(model, "--weights", "dequantized").plan["stages"][0]
    rows = 10 * 100 + 10 + 10
    assert packed["estimated_memory_bytes"] == rows * (64 // 2 + 2 + 2) + 2 * 64
    assert plain["estimated_memory_bytes"] == rows * 64 * 4 + 4 * 64


def test_what_does_not_fit(plan: Command, planned: Callable[..., Path]) -> None:
    """Exit code 1; the line says which stage, how many bytes short, and what would help."""
    size = str(3 * LAYER)
    done = plan(planned(), "--pp-size", "3", "--memory", size)
    assert (done.code, done.out) == (1, "")
    assert "No division of the layers fits the memory" in done.err
    assert f"stage 1 (local-stage-1) is {LAYER} bytes short: layers" in done.err
    assert "What would help: 4 stages of this size (--pp-size 4); or quantized weights." in done.err
    assert plan(planned(), "--pp-size", "4", "--memory", size).code == 0


def test_ranges_that_do_not_fit(plan: Command, planned: Callable[..., Path]) -> None:
    """Cuts by hand are held against the memory too, and the room elsewhere is named."""
    flags = ("--pp-layers", "0-4,5-9", "--memory", f"{4 * LAYER + TABLE},1GB")
    done = plan(planned(), *flags)
    assert done.code == 1
    assert f"stage 0 (local-stage-0) is {LAYER} bytes short: layers 0-4 need" in done.err
    assert "The most room is on stage 1" in done.err
    assert "another division of the layers (leave --pp-layers out)" in done.err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--pp-size", "11"], "11 stages are more than the 10 layers"),
        (["--pp-size", "0"], "--pp-size 0 is out of range"),
        (["--pp-layers", "0-3,5-9"], "layer 4 is missing"),
        (["--pp-layers", "0-9,9"], "comes earlier too"),
        (["--pp-layers", "0-4,9-5"], "runs backwards"),
        (["--pp-layers", "0-4,5-10"], "there is no layer 10"),
        (["--pp-layers", "5-9,0-4"], "layers 0-4 are missing"),
        (["--pp-layers", "0-4,5-9", "--pp-size", "3"], "--pp-size 3 disagrees"),
        (["--pp-layers", "0-2,3-9"], "must share a stage"),
        (["--pp-size", "2", "--memory", "1GB,1GB,1GB"], "--memory gives 3 sizes for 2 stage"),
        (["--memory", "1GB,1GB"], "--memory gives 2 sizes for 1 stage"),
        (["--memory", "0"], "--memory of 0 bytes cannot be"),
        (["--memory", "0GB"], "--memory of 0 bytes cannot be"),
        (["--memory", "5000PB"], "cannot be"),
        (["--memory=-1GB"], "--memory '-1GB' is no size"),
        (["--memory", "lots"], "--memory 'lots' is no size"),
        (["--memory", "1GB,"], "--memory '' is no size"),
        (["--memory", "1GB", "--reserve", "2GB"], "leaves nothing"),
        (["--reserve", "2GB"], "--reserve needs --memory"),
        (["--sequences", "2"], "--sequences needs --context"),
        (["--context", "0"], "--context 0 is out of range"),
        (["--context", "10", "--sequences", "-1"], "--sequences -1 is out of range"),
        (["--context", str(10**15)], "is out of range"),
    ],
)
def test_bad_flags(
    flags: list[str], problem: str, plan: Command, planned: Callable[..., Path]
) -> None:
    """What can never work is one line and exit code 2."""
    done = plan(planned(joined=True), *flags)
    assert (done.code, done.out) == (2, "")
    [line] = [line for line in done.err.splitlines() if line.startswith("mlxcel: error")]
    assert problem in line


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"quantization": {"mode": "zip4"}}, "unknown mode 'zip4'"),
    ],
)
def test_bad_configs(
    settings: dict[str, Any], problem: str, plan: Command, planned: Callable[..., Path]
) -> None:
    """A config.json that cannot be is one line and exit code 1."""
    done = plan(planned(**settings))
    assert (done.code, done.out) == (1, "")
    assert problem in done.err


def test_plugins_can_be_left_out(plan: Command, planned: Callable[..., Path]) -> None:
    """--no-plugin works as everywhere."""
    assert plan(planned()).code == 0
    done = plan(planned(), "--no-plugin", "planned", "--no-plugin", "generic")
    assert done.code == 2
    assert "no installed family serves model_type 'planned'" in done.err


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_nothing_heavy_is_imported(name: str, tiny: Callable[..., Path]) -> None:
    """A plan needs neither MLX nor mlx-lm nor transformers."""
    source = (
        "import sys\nfrom mlxcel.cli.main import run\n"
        f"code = run(['plan', '-m', {str(tiny(name))!r}, '--pp-size', '2'])\n"
        "heavy = [n for n in sys.modules if n.split('.')[0] in ('mlx', 'mlx_lm', 'transformers')]\n"
        "print(code, heavy, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.splitlines()[-1] == "0 []"


def test_memory_of_this_machine(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--memory auto divides what is free here between the stages, and refuses what does not fit."""
    where = "mlxcel.checkpoint.weights_mode.available_memory"
    command = ["plan", "-m", str(tiny("llama")), "--pp-size", "2", "--memory", "auto"]
    monkeypatch.setattr(where, lambda: 1 << 30)
    assert run(command) == 0
    assert "536.87 MB" in capsys.readouterr().out
    monkeypatch.setattr(where, lambda: 1000)
    assert run(command) == 1
    assert "bytes short" in capsys.readouterr().err
    monkeypatch.setattr(where, lambda: None)
    assert run(command) == 2
    assert "--memory auto" in capsys.readouterr().err
