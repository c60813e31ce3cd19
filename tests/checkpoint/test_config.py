import json
import math
from pathlib import Path
from typing import Any

import pytest

from mlxcel.checkpoint import json_file
from mlxcel.checkpoint.config import read_config
from mlxcel.errors import CheckpointError

PLAIN: dict[str, Any] = {"model_type": "toy", "num_hidden_layers": 2}


def write(folder: Path, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**PLAIN, **settings}))
    return folder


def test_folder_and_file_are_the_same(tmp_path: Path) -> None:
    """A checkpoint is named by its folder or by its config.json."""
    config = read_config(write(tmp_path))
    assert config == read_config(tmp_path / "config.json")
    assert (config.path, config.model_type, config.num_layers) == (
        tmp_path / "config.json",
        "toy",
        2,
    )


@pytest.mark.parametrize(
    "lists",
    [
        {"hybrid_override_pattern": "M*-", "layers_block_type": ["mamba"]},
        {"layers_block_type": ["mamba", "mlp", "moe"]},
        {"layer_types": ["full_attention"] * 3},
        {"text_config": {"layer_types": ["full_attention"] * 3}},
    ],
)
def test_the_layers_of_a_list(tmp_path: Path, lists: dict[str, Any]) -> None:
    """Where nothing else counts the layers, a list with an entry for each does."""
    assert read_config(write(tmp_path, num_hidden_layers=None, **lists)).num_layers == 3
    given = read_config(write(tmp_path, num_hidden_layers=2, **lists))
    assert given.num_layers == 2


def test_text_settings_win_over_the_top(tmp_path: Path) -> None:
    """Nested text settings come first, the top level second, and null counts as absent."""
    write(
        tmp_path,
        num_hidden_layers=None,
        text_config={"num_hidden_layers": 3, "hidden_size": 8, "rope": None},
        hidden_size=99,
        rope=7,
        vision_config={},
    )
    config = read_config(tmp_path)
    assert config.num_layers == 3
    assert config.get("hidden_size") == 8
    assert config.get("rope") == 7
    assert config.get("absent", 5) == 5
    assert config.first("absent", "rope", "hidden_size") == 7
    assert config.first("absent") is None
    assert config.has_vision
    assert config.raw["hidden_size"] == 99


def test_null_vision_config_is_no_vision(tmp_path: Path) -> None:
    """A vision_config of null does not make a vision model."""
    assert not read_config(write(tmp_path, vision_config=None)).has_vision


def test_require_names_file_and_key(tmp_path: Path) -> None:
    """A required key that is absent is an error that names it and the file."""
    config = read_config(write(tmp_path, hidden_size=8))
    assert config.require("hidden_size") == 8
    with pytest.raises(CheckpointError, match=r"config\.json.*'head_dim'"):
        config.require("head_dim")


@pytest.mark.parametrize(
    ("top", "text", "generation", "expected"),
    [
        (None, None, None, ()),
        (2, None, None, (2,)),
        ([2, 3], 4, None, (2, 3)),
        (None, 4, None, (4,)),
        (2, None, {"eos_token_id": [5, 6]}, (5, 6)),
        (2, None, {"eos_token_id": 0}, (0,)),
        (2, None, {"temperature": 1.0}, (2,)),
    ],
)
def test_end_of_sequence_ids(
    tmp_path: Path, top: Any, text: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    """generation_config.json decides the end ids, then config.json, then its text settings."""
    write(tmp_path, eos_token_id=top, text_config={"eos_token_id": text})
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("bad", ["2", True, [2, None], -1])
def test_bad_end_of_sequence_id(tmp_path: Path, bad: Any) -> None:
    """An end id that is no token id is refused, not passed on."""
    with pytest.raises(CheckpointError, match="eos_token_id"):
        read_config(write(tmp_path, eos_token_id=bad))


def test_tagged_floats_become_floats(tmp_path: Path) -> None:
    """Non-finite floats that transformers tagged are floats again, at any depth."""
    config = read_config(
        write(tmp_path, rope={"limits": [{"__float__": "Infinity"}, {"__float__": "-Infinity"}]})
    )
    assert config.get("rope") == {"limits": [math.inf, -math.inf]}
    assert math.isnan(read_config(write(tmp_path, a={"__float__": "NaN"})).get("a"))


@pytest.mark.parametrize("count", [None, 0, -1, True, 2.0, "2", 10_001])
def test_absurd_layer_counts(tmp_path: Path, count: Any) -> None:
    """A layer count that no model has is refused before anything is sized by it."""
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        read_config(write(tmp_path, num_hidden_layers=count))


@pytest.mark.parametrize("model_type", [None, "", 3])
def test_no_model_type(tmp_path: Path, model_type: Any) -> None:
    """Without a model_type there is nothing to choose a family by."""
    with pytest.raises(CheckpointError, match="model_type"):
        read_config(write(tmp_path, model_type=model_type))


def test_code_from_a_checkpoint_never_runs(tmp_path: Path) -> None:
    """model_file is refused with the reason; auto_map, which hub configs carry, is ignored."""
    assert read_config(write(tmp_path, auto_map={"AutoModel": "x.Y"})).num_layers == 2
    with pytest.raises(CheckpointError, match=r"evil\.py.*never runs"):
        read_config(write(tmp_path, model_file="evil.py"))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\xfa", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "no JSON object"),
    ],
)
def test_malformed_file(tmp_path: Path, content: bytes, what: str) -> None:
    """Whatever the bytes, the error is typed and names the file."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=what) as raised:
        read_config(tmp_path)
    assert raised.value.path == tmp_path / "config.json"


def test_oversized_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beyond the cap is refused without being parsed."""
    monkeypatch.setattr(json_file, "MAX_BYTES", 10)
    with pytest.raises(CheckpointError, match="larger than"):
        read_config(write(tmp_path))


def test_wrong_places(tmp_path: Path) -> None:
    """A path that holds no checkpoint says what to name instead."""
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_config(tmp_path / "nowhere")
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    with pytest.raises(CheckpointError, match="import-gguf"):
        read_config(gguf)
    with pytest.raises(CheckpointError, match=r"hf download org/Some-Model-1\.5B"):
        read_config(Path("org/Some-Model-1.5B"))
