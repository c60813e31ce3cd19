"""A tiny Mixtral: experts in every layer, their projections named by number."""

from __future__ import annotations

from mlxcel.testing.tiny.common import DENSE, one_per_expert
from mlxcel.testing.tiny.recipe import Config, Recipe, Weights

_CONFIG = {
    **{key: value for key, value in DENSE.items() if key != "head_dim"},
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_theta": 1e6,
}


def _to_hub(weights: Weights, config: Config) -> Weights:
    return one_per_expert(weights, names={"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"})


RECIPES = (Recipe("mixtral", _CONFIG, _to_hub, seed="mixtral:0"),)
