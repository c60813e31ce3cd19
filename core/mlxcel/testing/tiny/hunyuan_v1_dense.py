"""A tiny dense Hunyuan: norms on queries and keys after their rotation."""

from __future__ import annotations

from mlxcel.testing.tiny.common import DENSE
from mlxcel.testing.tiny.recipe import Recipe

_CONFIG = {
    **DENSE,
    "model_type": "hunyuan_v1_dense",
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "use_qk_norm": True,
    "rope_theta": 10000.0,
    "rope_scaling": {"alpha": 100.0, "factor": 1.0, "type": "dynamic"},
    "tie_word_embeddings": True,
}

RECIPES = (Recipe("hunyuan_v1_dense", _CONFIG, seed="hunyuan_v1_dense:4"),)
