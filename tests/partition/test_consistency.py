"""Whether config.json and weights belong together, seen from the headers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxcel.checkpoint.checkpoint import Checkpoint, open_checkpoint
from mlxcel.errors import CheckpointError
from mlxcel.family.contract import Family
from mlxcel.partition.consistency import check_consistency, oddities

HEAD = {"lm_head.weight": (4, 4)}
LAYERS = {
    "model.embed_tokens.weight": (4, 4),
    "model.layers.0.mlp.up_proj.weight": (4, 4),
    "model.layers.1.mlp.up_proj.weight": (4, 4),
    "model.norm.weight": (4,),
}


class Plain(Family):
    api_version = "1.0"


def checkpoint(path: Path, shapes: dict[str, tuple[int, ...]], **config: object) -> Checkpoint:
    """A checkpoint with tensors of these shapes, opened; two layers unless ``config`` says."""
    settings = {"model_type": "plain", "num_hidden_layers": 2, **config}
    (path / "config.json").write_text(json.dumps(settings))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    return open_checkpoint(path)


@pytest.mark.parametrize(
    ("head", "tied"), [(HEAD, False), (HEAD, True), ({}, True)], ids=["untied", "both", "tied"]
)
def test_a_head_or_a_tie_is_enough(
    tmp_path: Path, head: dict[str, tuple[int, ...]], tied: bool
) -> None:
    """A model needs a head of its own, or the table in its place; both do no harm."""
    model = checkpoint(tmp_path, LAYERS | head, tie_word_embeddings=tied)
    check_consistency(model, Plain())
    assert oddities(model, Plain()) == ()


def test_an_untied_model_needs_a_head(tmp_path: Path) -> None:
    """The final norm alone is no head; the error names the setting to correct."""
    model = checkpoint(tmp_path, LAYERS, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to true"):
        check_consistency(model, Plain())


def test_packed_weights_need_settings(tmp_path: Path) -> None:
    """Scales without quantization settings are refused with the first of their names."""
    packed = LAYERS | HEAD | {"model.layers.0.mlp.up_proj.scales": (4, 1)}
    with pytest.raises(CheckpointError, match=r"no quantization settings.*up_proj\.scales"):
        check_consistency(checkpoint(tmp_path, packed), Plain())
    settings = {"bits": 4, "group_size": 32}
    check_consistency(checkpoint(tmp_path, packed, quantization=settings), Plain())


def test_scales_of_something_else_are_not_packing(tmp_path: Path) -> None:
    """A parameter that is called scales and has no weight beside it means no quantization."""
    check_consistency(
        checkpoint(tmp_path, LAYERS | HEAD | {"model.layers.0.router.scales": (4,)}), Plain()
    )


def test_layers_beyond_the_last_are_told(tmp_path: Path) -> None:
    """Weights of layers that config.json does not count are named."""
    [notice] = oddities(checkpoint(tmp_path, LAYERS, num_hidden_layers=1), Plain())
    assert "the weights of layer 1 are ignored: config.json describes 1 layer" in notice


def test_draft_layers_are_expected(tmp_path: Path) -> None:
    """As many layers as num_nextn_predict_layers stand behind the last one without a word."""
    model = checkpoint(tmp_path, LAYERS, num_hidden_layers=1, num_nextn_predict_layers=1)
    assert oddities(model, Plain()) == ()
    model = checkpoint(tmp_path, LAYERS, num_hidden_layers=1, num_nextn_predict_layers="one")
    assert len(oddities(model, Plain())) == 1


def test_layers_of_other_towers_do_not_count(tmp_path: Path) -> None:
    """A vision tower may have more layers than the language model."""
    tower = {"vision_tower.layers.7.mlp.up_proj.weight": (4, 4)}
    assert oddities(checkpoint(tmp_path, LAYERS | tower), Plain()) == ()


def test_unused_quantization_settings_are_told(tmp_path: Path) -> None:
    """An override that names no module is named; one under a renamed prefix fits."""
    overrides = {"language_model.model.layers.0.mlp.up_proj": {"bits": 8}, "a.b": {"bits": 8}}
    model = checkpoint(tmp_path, LAYERS, quantization={"bits": 4, "group_size": 32, **overrides})
    [notice] = oddities(model, Plain())
    assert notice.endswith("ignored: a.b")
