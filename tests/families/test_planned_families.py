"""Families as they are planned: what goes where, what a token touches, refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.checkpoint.config import ModelConfig, read_config
from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.errors import CheckpointError, UnsupportedError
from mlxcel.family import Family, Part, Place
from mlxcel.family.choose import choose_family
from mlxcel.partition.from_config import checkpoint_from_config
from mlxcel.partition.profile import profile_checkpoint
from mlxcel.plugins import Plugins
from mlxcel.testing.headers_only import write_headers
from mlxcel.testing.published import PUBLISHED

BY_TYPE: dict[str, dict[str, Any]] = {}
for _published in PUBLISHED:
    BY_TYPE.setdefault(_published.config["model_type"], dict(_published.config))

Read = Callable[..., tuple[Family, ModelConfig]]


@pytest.fixture
def read(tmp_path: Path, plugins: Plugins) -> Read:
    """Reads the real-size config of a model_type, with some settings changed."""

    def read(model_type: str, **changes: Any) -> tuple[Family, ModelConfig]:
        content = copy.deepcopy(BY_TYPE[model_type])
        content.get("text_config", content).update(changes)
        (tmp_path / "config.json").write_text(json.dumps(content))
        config = read_config(tmp_path)
        return choose_family(config, plugins)[1], config

    return read


# What goes where


@pytest.mark.parametrize(
    ("model_type", "name", "place"),
    [
        ("nemotron_h", "backbone.embeddings.weight", Place(Part.TABLE)),
        ("nemotron_h", "backbone.norm_f.weight", Place(Part.HEAD)),
        ("nemotron_h", "backbone.layers.7.norm.weight", Place(Part.LAYER, 7)),
        ("nemotron_h", "mtp.layers.0.norm.weight", Place(Part.UNUSED)),
        ("nemotron_h", "lm_head.weight", Place(Part.HEAD)),
        ("glm4_moe", "model.layers.45.mlp.gate.weight", Place(Part.LAYER, 45)),
        ("glm4_moe", "model.layers.46.eh_proj.weight", Place(Part.UNUSED)),
        ("glm4_moe_lite", "model.layers.47.shared_head.head.weight", Place(Part.UNUSED)),
        ("glm_moe_dsa", "model.layers.78.enorm.weight", Place(Part.UNUSED)),
        ("glm_moe_dsa", "model.layers.3.self_attn.indexer.wk.weight", Place(Part.LAYER, 3)),
        ("qwen3_next", "mtp.fc.weight", Place(Part.UNUSED)),
        ("qwen3_5_moe", "model.visual.patch_embed.proj.weight", Place(Part.UNUSED)),
        ("qwen3_5_moe", "model.language_model.embed_tokens.weight", Place(Part.TABLE)),
        ("gemma3_text", "lm_head.weight", Place(Part.UNUSED)),
        ("gpt_oss", "model.layers.2.mlp.experts.gate_up_proj_blocks", Place(Part.LAYER, 2)),
        ("mixtral", "model.layers.2.block_sparse_moe.experts.7.w1.weight", Place(Part.LAYER, 2)),
        ("ernie4_5", "lm_head.weight", Place(Part.UNUSED)),
        ("ernie4_5_moe", "model.mtp_block.0.input_layernorm.weight", Place(Part.UNUSED)),
        ("ernie4_5_moe", "model.mtp_emb_norm.0.weight", Place(Part.UNUSED)),
        (
            "ernie4_5_moe",
            "model.layers.3.mlp.moe_statics.e_score_correction_bias",
            Place(Part.UNUSED),
        ),
        ("kimi_k3", "language_model.model.layers.92.mlp_res.proj_weight", Place(Part.LAYER, 92)),
        ("kimi_k3", "language_model.model.output_attn_res.norm_weight", Place(Part.HEAD)),
        ("kimi_k3", "language_model.model.norm.weight", Place(Part.HEAD)),
        ("kimi_k3", "language_model.model.embed_tokens.weight", Place(Part.TABLE)),
        ("kimi_k3", "mm_projector.pre_norm.weight", Place(Part.UNUSED)),
        ("kimi_k3", "vision_tower.encoder.blocks.0.norm0.weight", Place(Part.UNUSED)),
    ],
)
def test_place(read: Read, model_type: str, name: str, place: Place) -> None:
    """Tensors go where the model has them, under the hub's names and under mlx-lm's."""
    family, config = read(model_type)
    assert family.place(name, config) == place


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_every_parameter_has_a_place(read: Read, model_type: str) -> None:
    """Nothing that a family foretells is unused, and every layer has something."""
    family, config = read(model_type)
    places = [family.place(shape.name, config) for shape in family.shapes(config)]
    parts = {place.part for place in places}
    assert {Part.TABLE, Part.LAYER, Part.HEAD} <= parts
    assert Part.UNUSED not in parts
    assert {place.layer for place in places} - {None} == set(range(config.num_layers))


# What a token touches


@pytest.mark.parametrize(
    ("model_type", "name", "share"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight", 2 / 8),
        ("mixtral", "model.layers.0.block_sparse_moe.switch_mlp.up_proj.weight", 2 / 8),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", 1),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj_blocks", 4 / 32),
        ("gpt_oss", "model.layers.0.mlp.router.weight", 1),
        ("glm4_moe", "model.layers.9.mlp.experts.0.up_proj.weight", 8 / 128),
        ("glm4_moe", "model.layers.9.mlp.shared_experts.up_proj.weight", 1),
        ("glm_moe_dsa", "model.layers.9.mlp.switch_mlp.up_proj.weight", 8 / 256),
        ("qwen2_moe", "model.layers.9.mlp.experts.0.up_proj.weight", 4 / 60),
        ("qwen2_moe", "model.layers.9.mlp.shared_expert.up_proj.weight", 1),
        ("qwen3_moe", "model.layers.9.mlp.switch_mlp.up_proj.weight", 8 / 128),
        ("qwen3_next", "model.layers.9.mlp.switch_mlp.up_proj.weight", 10 / 512),
        ("qwen3_5_moe", "model.language_model.layers.9.mlp.experts.gate_up_proj", 8 / 256),
        ("ernie4_5_moe", "model.layers.9.mlp.experts.0.up_proj.weight", 6 / 64),
        ("ernie4_5_moe", "model.layers.9.mlp.shared_experts.up_proj.weight", 1),
        ("kimi_k3", "language_model.model.layers.9.mlp.switch_mlp.up_proj.weight", 16 / 896),
        ("phimoe", "model.layers.9.block_sparse_moe.switch_mlp.up_proj.weight", 2 / 16),
    ],
)
def test_touched(read: Read, model_type: str, name: str, share: float) -> None:
    """A token passes top-k of n experts, and all of everything else."""
    family, config = read(model_type)
    assert family.touched(name, config) == share


def test_nemotron_experts(read: Read) -> None:
    """Nemotron's experts are counted like DeepSeek's."""
    family, config = read("nemotron_h", n_routed_experts=8, num_experts_per_tok=2)
    assert family.touched("backbone.layers.1.mixer.experts.0.up_proj.weight", config) == 1 / 4


# Ends


@pytest.mark.parametrize("model_type", ["gpt_oss", "glm4", "glm4_moe_lite", "glm_moe_dsa"])
def test_a_head_of_its_own(read: Read, model_type: str) -> None:
    """Where mlx-lm's model always has a head, config.json cannot tie it."""
    family, config = read(model_type, tie_word_embeddings=True)
    assert not family.tied(config)


def test_the_checkpoint_decides_about_a_gemma_3(tmp_path: Path, read: Read) -> None:
    """As in mlx-lm: without a head in the files, the embedding is the head."""
    family, config = read("gemma3_text", tie_word_embeddings=False)
    assert family.tied(family.settle(config, ["model.embed_tokens.weight"]))
    assert not family.tied(family.settle(config, ["lm_head.weight"]))
    path = write_headers(tmp_path / "headers", BY_TYPE["gemma3_text"])
    assert family.tied(family.open(path).config)


def test_cuts_of_a_small_gemma_4(read: Read) -> None:
    """Layers 15 to 34 read keys of layer 13 or 14: a stage begins at 1 to 13 only."""
    family, config = read("gemma4")
    groups = family.adjacency(config)
    legal = [cut for cut in range(1, 35) if not any(group.cut_by(cut) for group in groups)]
    assert legal == list(range(1, 14))
    caches = family.caches(config)
    assert [index for index, kind in enumerate(caches) if kind is None] == list(range(15, 35))


# Kimi K3


def test_fewer_layers_of_a_kimi(read: Read) -> None:
    """A lowered num_hidden_layers plans the first layers, and places the rest nowhere."""
    family, config = read("kimi_k3", num_hidden_layers=6)
    names = {shape.name for shape in family.shapes(config)}
    assert any(".layers.5." in name for name in names)
    assert not any(".layers.6." in name for name in names)
    assert len(family.caches(config)) == 6
    assert family.place("language_model.model.layers.6.mlp.gate.weight", config) == Place(
        Part.UNUSED
    )


def test_layers_of_a_kimi_are_costed_apart(read: Read, tmp_path: Path) -> None:
    """Dense, delta and latent layers weigh differently, and the whole about 1.4 TB."""
    family, config = read("kimi_k3")
    (tmp_path / "config.json").write_text(
        json.dumps({**config.raw, "quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}})
    )
    estimate = checkpoint_from_config(tmp_path / "config.json", family)
    layers = profile_checkpoint(estimate, family, DtypeChoice(None, "")).layers
    dense, delta, latent = (layers[index].bytes for index in (0, 1, 3))
    assert dense < latent < delta
    assert {layer.bytes for layer in layers} == {dense, delta, latent}
    assert 1.3e12 < sum(layer.bytes for layer in layers) < 1.6e12


# Configs that cannot be


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        *[(model_type, "num_key_value_heads", 5) for model_type in ("llama", "mistral", "mixtral")],
        *[(model_type, "num_key_value_heads", 5) for model_type in ("gpt_oss", "qwen2", "qwen3")],
        *[(model_type, "num_key_value_heads", 5) for model_type in ("glm4", "glm4_moe")],
        *[(model_type, "num_key_value_heads", 5) for model_type in ("ernie4_5", "gemma3_text")],
        *[(model_type, "num_key_value_heads", 5) for model_type in ("qwen3_next", "nemotron_h")],
        ("gemma4", "num_key_value_heads", 3),
        ("hunyuan_v1_dense", "num_key_value_heads", 5),
        ("phimoe", "num_key_value_heads", 5),
        ("qwen3_5_moe", "linear_num_key_heads", 5),
        ("qwen2", "hidden_size", 895),
        ("llama", "vocab_size", None),
        ("llama", "attention_bias", "yes"),
        ("llama", "layer_types", ["full_attention"] * 15),
        ("gpt_oss", "layer_types", ["full_attention"] * 25),
        ("gpt_oss", "layer_types", ["full_attention"] * 23 + ["square_attention"]),
        ("gpt_oss", "sliding_window", None),
        ("gemma4", "layer_types", ["full_attention"] * 3),
        ("gemma4", "layer_types", ["full_attention"] * 34 + ["sliding_attention"]),
        ("gemma4", "num_kv_shared_layers", 35),
        ("mixtral", "num_local_experts", None),
        ("deepseek_v3", "kv_lora_rank", None),
        ("deepseek_v3", "n_routed_experts", 0),
        ("deepseek_v3", "moe_layer_freq", 0),
        ("glm4_moe", "use_qk_norm", None),
        ("glm_moe_dsa", "q_lora_rank", None),
        ("glm_moe_dsa", "index_head_dim", None),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_next", "mlp_only_layers", 2),
        ("nemotron_h", "hybrid_override_pattern", "M-" * 20),
        ("nemotron_h", "hybrid_override_pattern", "MX" * 26),
        ("nemotron_h", "hybrid_override_pattern", None),
        ("nemotron_h", "n_groups", 7),
        ("ernie4_5_moe", "moe_layer_start_index", "first"),
        ("kimi_k3", "linear_attn_config", None),
        ("exaone_moe", "is_moe_layer", [True] * 3),
    ],
)
def test_wrong_configs(read: Read, model_type: str, field: str, value: object) -> None:
    """A field that is missing, or contradicts another, is named with config.json."""
    family, config = read(model_type, **{field: value})

    def ask() -> None:
        list(family.shapes(config))
        family.caches(config)

    with pytest.raises(CheckpointError, match=field) as caught:
        ask()
    assert caught.value.path.name == "config.json"


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_heads", None), ("head_dim", 0), ("kda_layers", 3), ("kda_layers", [0])],
)
def test_wrong_delta_attention(read: Read, field: str, value: object) -> None:
    """So are the fields of the object inside a Kimi's config."""
    _, config = read("kimi_k3")
    settings = {**config.require("linear_attn_config"), field: value}
    family, config = read("kimi_k3", linear_attn_config=settings)
    with pytest.raises(CheckpointError, match=field):
        family.shapes(config)


def test_plain_queries_are_said_with_null(read: Read) -> None:
    """``q_lora_rank`` may be null; left out, it is missing."""
    family, config = read("deepseek_v3", q_lora_rank=None)
    names = {shape.name for shape in family.shapes(config)}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    settings = {key: value for key, value in config.raw.items() if key != "q_lora_rank"}
    config.path.write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="q_lora_rank"):
        family.shapes(read_config(config.path))


# The last choice


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("mamba2", "ssm_state_size"), ("minicpm3", "kv_lora_rank"), ("lfm2", "conv_L_cache")],
)
def test_what_no_profile_fits(tmp_path: Path, plugins: Plugins, model_type: str, key: str) -> None:
    """A model of other parts is refused by the key that says so, unless its weights are there."""
    content = {**BY_TYPE["qwen3"], "model_type": model_type, key: 64}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_config(tmp_path)
    name, family = choose_family(config, plugins)
    assert name == f"generic:{model_type}"
    for ask in (family.shapes, family.caches):
        with pytest.raises(UnsupportedError, match=f"{key}.*folder that holds the weights"):
            list(ask(config))
