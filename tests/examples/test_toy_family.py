"""The example of a third-party family."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.cli.main import run
from mlxcel.testing.split import Chain, Scene, differences, every_cut

ROOT = Path(__file__).parents[2]
TOY = ROOT / "examples" / "toy_family"
LIST = "import sys; from mlxcel.cli.main import run; sys.exit(run(['plugins', '--json']))"


@pytest.mark.slow
def test_it_installs_and_is_listed(tmp_path: Path) -> None:
    """Installed like any package, the family appears in the listing as loaded."""
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", tmp_path, TOY],
        check=True,
        timeout=300,
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "core")])
    done = subprocess.run(
        [sys.executable, "-c", LIST],
        env={**os.environ, "PYTHONPATH": path, "MLXCEL_PLUGINS": "toy"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    [toy] = [record for record in json.loads(done.stdout) if record["name"] == "toy"]
    assert (toy["state"], toy["distribution"]) == ("loaded", "mlxcel-family-toy")


@pytest.fixture
def toy(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint of the toy family: a tiny Llama under another name."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "toy")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "toy"}))
    return folder


def generate(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[int]:
    assert run(["generate", "-m", str(path), "-p", "Hello", "-n", "8", "--json", *flags]) == 0
    tokens: list[int] = json.loads(capsys.readouterr().out.splitlines()[0])["tokens"]
    return tokens


def test_it_generates(
    toy: Path,
    tiny: Callable[..., Path],
    make_site: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its checkpoint runs on one stage and on several, with the tokens of the Llama it is."""
    monkeypatch.syspath_prepend(str(TOY))
    points = {"mlxcel.families": {"toy": "mlxcel_family_toy:plugin"}}
    make_site("site").distribution("mlxcel-family-toy", points)
    expected = generate(tiny("llama"), capsys)
    for stages in ("1", "2", "3"):
        assert generate(toy, capsys, "--pp-size", stages) == expected


def test_it_is_refused_without_the_plugin(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the plugin is not installed, nobody serves its model_type but the last choice."""
    assert run(["generate", "-m", str(toy), "-p", "Hello", "--no-plugin", "generic"]) == 2
    assert "no installed family serves model_type 'toy'" in capsys.readouterr().err


def test_split_equals_whole(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut at every layer, its logits are those of one stage to the last bit."""
    monkeypatch.syspath_prepend(str(TOY))
    family = importlib.import_module("mlxcel_family_toy").plugin
    assert len(every_cut(toy, family)) == 6
    whole, chain = Chain(toy, family, [range(6)]), Chain(toy, family, every_cut(toy, family))
    assert list(differences(whole, chain, Scene((17, 5, 11)))) == []
