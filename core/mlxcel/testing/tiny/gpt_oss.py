"""Tiny gpt-oss checkpoints: attention with sinks; experts packed as MXFP4, or plain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxcel.testing.tiny.common import DENSE
from mlxcel.testing.tiny.recipe import Config, Recipe, Weights

if TYPE_CHECKING:
    import mlx.core as mx

_PLAIN = {
    **DENSE,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
    },
}

_PACKED = {
    **_PLAIN,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


def _interleaved(gate: mx.array, up: mx.array, axis: int) -> mx.array:
    """Gate and up in turn along ``axis``."""
    import mlx.core as mx

    both = mx.stack([gate, up], axis=axis + 1)
    shape = list(gate.shape)
    shape[axis] *= 2
    return both.reshape(shape)


def _experts(weights: Weights) -> list[str]:
    end = ".experts.gate_proj.weight"
    return [name.removesuffix(".gate_proj.weight") for name in weights if name.endswith(end)]


def _plain_to_hub(weights: Weights, config: Config) -> Weights:
    """Experts as [expert, inputs, outputs], the outputs of gate and up in turn."""
    hub = {name: value for name, value in weights.items() if ".experts." not in name}
    for experts in _experts(weights):
        gate, up, down = (weights[f"{experts}.{p}_proj.weight"] for p in ("gate", "up", "down"))
        hub[f"{experts}.gate_up_proj"] = _interleaved(gate, up, 1).swapaxes(1, 2)
        hub[f"{experts}.down_proj"] = down.swapaxes(1, 2)
        hub |= _biases(weights, experts)
    return hub


def _packed_to_hub(weights: Weights, config: Config) -> Weights:
    """Experts as blocks of 32 values in 16 bytes with a scale each."""
    import mlx.core as mx

    hub = {name: value for name, value in weights.items() if ".experts." not in name}
    for experts in _experts(weights):
        gate, up, down = (weights[f"{experts}.{p}_proj.weight"] for p in ("gate", "up", "down"))
        both = {"gate_up_proj": _interleaved(gate, up, 1), "down_proj": down}
        for name, value in both.items():
            packed, scales, *_ = mx.quantize(value, group_size=32, bits=4, mode="mxfp4")
            blocks = packed.view(mx.uint8)
            hub[f"{experts}.{name}_blocks"] = blocks.reshape(*blocks.shape[:-1], -1, 16)
            hub[f"{experts}.{name}_scales"] = scales
        hub |= _biases(weights, experts)
    return hub


def _biases(weights: Weights, experts: str) -> Weights:
    gate, up = (weights[f"{experts}.{p}_proj.bias"] for p in ("gate", "up"))
    return {
        f"{experts}.gate_up_proj_bias": _interleaved(gate, up, 1),
        f"{experts}.down_proj_bias": weights[f"{experts}.down_proj.bias"],
    }


RECIPES = (
    Recipe("gpt_oss", _PACKED, _packed_to_hub, seed="gpt_oss:0"),
    Recipe("gpt_oss_plain", _PLAIN, _plain_to_hub, seed="gpt_oss:0"),
)
