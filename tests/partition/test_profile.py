"""What the parts of a checkpoint cost, from its headers."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxcel.checkpoint.checkpoint import Checkpoint, open_checkpoint
from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.errors import CheckpointError
from mlxcel.family.contract import Family, LayerAdjacencyGroup
from mlxcel.partition.profile import LayerProfile, profile_checkpoint

AS_STORED = DtypeChoice(None, "")
FLOAT32 = DtypeChoice("float32", "")
HALF = np.float16


class Plain(Family):
    api_version = "1.0"


def checkpoint(path: Path, tensors: dict[str, np.ndarray], **config: object) -> Checkpoint:
    """A checkpoint with these tensors, opened."""
    (path / "config.json").write_text(json.dumps({"model_type": "plain", **config}))
    save_file(tensors, path / "model.safetensors")
    return open_checkpoint(path)


def two_layers() -> dict[str, np.ndarray]:
    """An embedding of 10 rows of 4, two layers, a norm and a head, in half precision."""
    return {
        "model.embed_tokens.weight": np.zeros((10, 4), HALF),
        "model.layers.0.mlp.up_proj.weight": np.zeros((8, 4), HALF),
        "model.layers.0.input_layernorm.weight": np.zeros(4, HALF),
        "model.layers.1.mlp.up_proj.weight": np.zeros((16, 4), HALF),
        "model.norm.weight": np.zeros(4, HALF),
        "lm_head.weight": np.zeros((10, 4), HALF),
    }


def test_bytes_are_those_of_the_headers(tmp_path: Path) -> None:
    """Each tensor's bytes count for the part of the model that the family places it in."""
    profile = profile_checkpoint(
        checkpoint(tmp_path, two_layers(), num_hidden_layers=2), Plain(), AS_STORED
    )
    assert [layer.bytes for layer in profile.layers] == [2 * (32 + 4), 2 * 64]
    assert profile.embedding_bytes == 2 * 40
    assert profile.head_bytes == 2 * (40 + 4)
    assert profile.shared_bytes == 0


def test_bytes_follow_the_casts_of_dtype(tmp_path: Path) -> None:
    """--dtype float32 doubles half-precision tensors, except those the family does not cast."""

    class Stubborn(Plain):
        def casts(self, name: str) -> bool:
            return "layernorm" not in name

    model = checkpoint(tmp_path, two_layers(), num_hidden_layers=2)
    profile = profile_checkpoint(model, Stubborn(), FLOAT32)
    assert profile.layers[0].bytes == 4 * 32 + 2 * 4
    assert profile.embedding_bytes == 4 * 40


def test_work_is_what_one_token_multiplies(tmp_path: Path) -> None:
    """A token works through whole layers and the whole head, but one row of the embedding."""
    profile = profile_checkpoint(
        checkpoint(tmp_path, two_layers(), num_hidden_layers=2), Plain(), AS_STORED
    )
    assert [layer.work for layer in profile.layers] == [32 + 4, 64]
    assert profile.embedding_work == 4
    assert profile.head_work == 40 + 4


@pytest.mark.parametrize("with_head", [True, False])
def test_a_tied_table_counts_at_both_ends(tmp_path: Path, with_head: bool) -> None:
    """A tied model's table is embedding and head, and a head in the files is never read."""
    tensors = two_layers()
    if not with_head:
        del tensors["lm_head.weight"]
    model = checkpoint(tmp_path, tensors, num_hidden_layers=2, tie_word_embeddings=True)
    profile = profile_checkpoint(model, Plain(), AS_STORED)
    assert profile.embedding_bytes == profile.shared_bytes == 2 * 40
    assert profile.head_bytes == 2 * (40 + 4)
    assert profile.embedding_work == 4
    assert profile.head_work == 40 + 4


def test_quantized_matrices_count_their_weights(tmp_path: Path) -> None:
    """A packed matrix works as much as the one it stands for, at its module's own group size."""
    packed = {
        "model.layers.0.mlp.up_proj.weight": np.zeros((8, 16), np.uint32),  # 8 x 128 at 4 bits
        "model.layers.0.mlp.up_proj.scales": np.zeros((8, 2), HALF),
        "model.layers.0.mlp.up_proj.biases": np.zeros((8, 2), HALF),
        "model.layers.0.mlp.up_proj.bias": np.zeros(8, HALF),
        "model.embed_tokens.weight": np.zeros((10, 32), np.uint32),  # 10 x 128 at 8 bits
        "model.embed_tokens.scales": np.zeros((10, 4), HALF),
        "model.embed_tokens.biases": np.zeros((10, 4), HALF),
    }
    model = checkpoint(
        tmp_path,
        packed,
        num_hidden_layers=1,
        tie_word_embeddings=True,
        quantization={
            "group_size": 64,
            "bits": 4,
            "model.embed_tokens": {"group_size": 32, "bits": 8},
        },
    )
    profile = profile_checkpoint(model, Plain(), FLOAT32)
    layer_bytes = 4 * 8 * 16 + 2 * 4 * 8 * 2 + 4 * 8
    assert profile.layers == (LayerProfile(bytes=layer_bytes, work=8 * 128 + 8),)
    assert profile.embedding_bytes == 4 * 10 * 32 + 2 * 4 * 10 * 4
    assert profile.embedding_work == 128
    assert profile.head_work == 10 * 128


def test_dequantized_bytes_are_those_of_plain_float32(tmp_path: Path) -> None:
    """Dequantized, a packed matrix takes 4 bytes a weight and its scales and biases nothing."""
    packed = {
        "model.layers.0.mlp.up_proj.weight": np.zeros((8, 16), np.uint32),  # 8 x 128 at 4 bits
        "model.layers.0.mlp.up_proj.scales": np.zeros((8, 2), HALF),
        "model.layers.0.mlp.up_proj.biases": np.zeros((8, 2), HALF),
        "model.layers.0.mlp.up_proj.bias": np.zeros(8, HALF),
        "model.layers.0.input_layernorm.weight": np.zeros(4, HALF),
        "model.embed_tokens.weight": np.zeros((10, 32), np.uint32),  # 10 x 128 at 8 bits
        "model.embed_tokens.scales": np.zeros((10, 4), HALF),
        "model.embed_tokens.biases": np.zeros((10, 4), HALF),
    }
    model = checkpoint(
        tmp_path,
        packed,
        num_hidden_layers=1,
        tie_word_embeddings=True,
        quantization={
            "group_size": 64,
            "bits": 4,
            "model.embed_tokens": {"group_size": 32, "bits": 8},
        },
    )
    profile = profile_checkpoint(model, Plain(), FLOAT32, dequantize=True)
    as_stored = profile_checkpoint(model, Plain(), FLOAT32)
    assert profile.layers[0].bytes == 4 * (8 * 128 + 8 + 4)
    assert profile.embedding_bytes == profile.shared_bytes == 4 * 10 * 128
    assert profile.total_bytes == 4 * (8 * 128 + 8 + 4) + 2 * 4 * 10 * 128
    assert profile.layers[0].work == as_stored.layers[0].work


def test_weights_packed_by_awq(tmp_path: Path) -> None:
    """AutoAWQ's integers hold eight weights each, in rows of inputs."""
    packed = {
        "model.layers.0.mlp.up_proj.qweight": np.zeros((128, 2), np.int32),  # 128 x 16
        "model.layers.0.mlp.up_proj.qzeros": np.zeros((1, 2), np.int32),
        "model.layers.0.mlp.up_proj.scales": np.zeros((1, 16), HALF),
    }
    model = checkpoint(
        tmp_path, packed, num_hidden_layers=1, quantization_config={"quant_method": "awq"}
    )
    profile = profile_checkpoint(model, Plain(), FLOAT32, dequantize=True)
    assert profile.layers == (LayerProfile(bytes=4 * 128 * 16, work=128 * 16),)


def test_experts_work_as_often_as_they_are_chosen(tmp_path: Path) -> None:
    """With 2 of 8 experts per token, an expert matrix works a quarter; its bytes all count."""
    tensors = {"model.layers.0.mlp.switch_mlp.up_proj.weight": np.zeros((8, 4, 4), HALF)}
    model = checkpoint(
        tmp_path, tensors, num_hidden_layers=1, num_local_experts=8, num_experts_per_tok=2
    )
    assert profile_checkpoint(model, Plain(), AS_STORED).layers == (
        LayerProfile(bytes=2 * 128, work=32),
    )


def test_other_towers_cost_nothing(tmp_path: Path) -> None:
    """Tensors that no stage reads do not count."""
    tensors = two_layers()
    model = checkpoint(tmp_path, tensors, num_hidden_layers=2)
    plain = profile_checkpoint(model, Plain(), AS_STORED)
    tensors["vision_tower.layers.0.weight"] = np.zeros((100, 100), HALF)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((16, 4), HALF)
    model = checkpoint(tmp_path, tensors, num_hidden_layers=2)
    assert profile_checkpoint(model, Plain(), AS_STORED) == plain


def test_groups_come_from_the_family(tmp_path: Path) -> None:
    """The layers that must share a stage are part of the profile."""
    group = LayerAdjacencyGroup(0, 2, "they share a cache")

    class Joined(Plain):
        def adjacency(self, config: object) -> tuple[LayerAdjacencyGroup, ...]:
            return (group,)

    model = checkpoint(tmp_path, two_layers(), num_hidden_layers=2)
    assert profile_checkpoint(model, Joined(), AS_STORED).groups == (group,)


def test_missing_layers_are_named(tmp_path: Path) -> None:
    """A checkpoint without some of its layers is refused, and the error names them."""
    model = checkpoint(tmp_path, two_layers(), num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=r"promises 5 layers.* layers 2-4"):
        profile_checkpoint(model, Plain(), AS_STORED)
