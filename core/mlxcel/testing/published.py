"""Configs of real sizes: what a plan sees, without the weights.

The values are those of published checkpoints as far as sizes go. A name in parentheses is of
a model whose sizes are not published, or were not looked up; its values are only plausible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

_SLIDING, _FULL = "sliding_attention", "full_attention"


@attrs.frozen
class Published:
    """One config: ``name`` of the model, and how its weights are packed (``"bits:group:mode"``)."""

    name: str
    config: Mapping[str, Any]
    quantize: str = "4:64:affine"


def _config(model_type: str, **settings: Any) -> dict[str, Any]:
    common = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096}
    return {"model_type": model_type, "torch_dtype": "bfloat16", **common, **settings}


def _nested(model_type: str, text: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1024},
        "text_config": text,
        **settings,
    }


def _dense(layers: int, hidden: int, inner: int, heads: int, kv: int, vocab: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
    }


_DEEPSEEK = {
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
_GATED_DELTA = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "head_dim": 256,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
}
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}

PUBLISHED: tuple[Published, ...] = (
    Published(
        "Llama-3.2-1B",
        _config(
            "llama",
            **_dense(16, 2048, 8192, 32, 8, 128256),
            head_dim=64,
            tie_word_embeddings=True,
        ),
    ),
    Published(
        "Mistral-7B-v0.3",
        _config("mistral", **_dense(32, 4096, 14336, 32, 8, 32768), tie_word_embeddings=False),
    ),
    Published(
        "Mixtral-8x7B-v0.1",
        _config(
            "mixtral",
            **_dense(32, 4096, 14336, 32, 8, 32000),
            num_local_experts=8,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
        ),
    ),
    Published(
        "DeepSeek-V3",
        _config(
            "deepseek_v3",
            **_dense(61, 7168, 18432, 128, 128, 129280),
            **{**_DEEPSEEK, "n_group": 8, "topk_group": 4},
            n_routed_experts=256,
            moe_intermediate_size=2048,
            first_k_dense_replace=3,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
    ),
    Published(
        "Llama-4-Scout",
        _nested(
            "llama4",
            _config(
                "llama4_text",
                **_dense(48, 5120, 8192, 40, 8, 202048),
                intermediate_size_mlp=16384,
                head_dim=128,
                num_local_experts=16,
                num_experts_per_tok=1,
                interleave_moe_layer_step=1,
                attention_bias=False,
                attention_chunk_size=8192,
                use_qk_norm=True,
                rope_scaling=None,
            ),
        ),
    ),
    Published(
        "gpt-oss-20b",
        _config(
            "gpt_oss",
            **_dense(24, 2880, 2880, 64, 8, 201088),
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            sliding_window=128,
            layer_types=[_SLIDING, _FULL] * 12,
            rope_scaling=_YARN,
        ),
        "4:32:mxfp4",
    ),
    Published(
        "gemma-3-1b",
        _config(
            "gemma3_text",
            **_dense(26, 1152, 6912, 4, 1, 262144),
            head_dim=256,
            sliding_window=512,
            sliding_window_pattern=6,
        ),
    ),
    Published(
        "gemma-4-e2b",
        _nested(
            "gemma4",
            _config(
                "gemma4_text",
                **_dense(35, 1536, 6144, 8, 1, 262144),
                head_dim=256,
                global_head_dim=512,
                num_kv_shared_layers=20,
                hidden_size_per_layer_input=256,
                vocab_size_per_layer_input=262144,
                use_double_wide_mlp=True,
                sliding_window=512,
                layer_types=([_SLIDING] * 4 + [_FULL]) * 7,
                tie_word_embeddings=True,
            ),
        ),
    ),
    Published(
        "(gemma-4-26b-a4b)",
        _nested(
            "gemma4",
            _config(
                "gemma4_text",
                **_dense(30, 2816, 2112, 16, 8, 262144),
                head_dim=256,
                global_head_dim=512,
                num_global_key_value_heads=2,
                attention_k_eq_v=True,
                num_kv_shared_layers=0,
                hidden_size_per_layer_input=0,
                enable_moe_block=True,
                num_experts=128,
                top_k_experts=8,
                moe_intermediate_size=704,
                use_double_wide_mlp=False,
                sliding_window=1024,
                layer_types=([_SLIDING] * 5 + [_FULL]) * 5,
                tie_word_embeddings=True,
            ),
        ),
    ),
    Published(
        "GLM-4-9B-0414",
        _config(
            "glm4",
            **_dense(40, 4096, 13696, 32, 2, 151552),
            head_dim=128,
            attention_bias=True,
            partial_rotary_factor=0.5,
            tie_word_embeddings=False,
        ),
    ),
    Published(
        "GLM-4.5-Air",
        _config(
            "glm4_moe",
            **_dense(46, 4096, 10944, 96, 8, 151552),
            **{**_DEEPSEEK, "attention_bias": True},
            head_dim=128,
            n_routed_experts=128,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            use_qk_norm=False,
            partial_rotary_factor=0.5,
            rope_scaling=None,
        ),
    ),
    Published(
        "GLM-4.7-Flash",
        _config(
            "glm4_moe_lite",
            **_dense(47, 2048, 10240, 20, 20, 154880),
            **{**_DEEPSEEK, "num_experts_per_tok": 4},
            n_routed_experts=64,
            moe_intermediate_size=1536,
            first_k_dense_replace=1,
            q_lora_rank=768,
            kv_lora_rank=512,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
        ),
    ),
    Published(
        "(GLM-5)",
        _config(
            "glm_moe_dsa",
            **_dense(78, 6144, 12288, 64, 64, 154880),
            **_DEEPSEEK,
            n_routed_experts=256,
            moe_intermediate_size=2048,
            first_k_dense_replace=3,
            q_lora_rank=2048,
            kv_lora_rank=512,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            index_head_dim=128,
            index_n_heads=32,
            index_topk=2048,
            rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        ),
    ),
    Published(
        "Qwen2.5-0.5B",
        _config("qwen2", **_dense(24, 896, 4864, 14, 2, 151936), tie_word_embeddings=True),
    ),
    Published(
        "Qwen1.5-MoE-A2.7B",
        _config(
            "qwen2_moe",
            **_dense(24, 2048, 5632, 16, 16, 151936),
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            tie_word_embeddings=False,
        ),
    ),
    Published(
        "Qwen3-0.6B",
        _config(
            "qwen3",
            **_dense(28, 1024, 3072, 16, 8, 151936),
            head_dim=128,
            tie_word_embeddings=True,
        ),
    ),
    Published(
        "Qwen3-30B-A3B",
        _config(
            "qwen3_moe",
            **_dense(48, 2048, 6144, 32, 4, 151936),
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
            tie_word_embeddings=False,
        ),
    ),
    Published(
        "(Qwen3.5-0.8B)",
        _nested(
            "qwen3_5",
            _config(
                "qwen3_5_text",
                **_dense(24, 1024, 3584, 8, 2, 248320),
                **_GATED_DELTA,
                linear_num_value_heads=16,
                tie_word_embeddings=True,
            ),
        ),
    ),
    Published(
        "(Qwen3.5-35B-A3B)",
        _nested(
            "qwen3_5_moe",
            _config(
                "qwen3_5_moe_text",
                **_dense(40, 2048, 8192, 16, 2, 248320),
                **_GATED_DELTA,
                linear_num_value_heads=32,
                num_experts=256,
                num_experts_per_tok=8,
                moe_intermediate_size=512,
                shared_expert_intermediate_size=512,
                tie_word_embeddings=False,
            ),
        ),
    ),
    Published(
        "Qwen3-Next-80B-A3B",
        _config(
            "qwen3_next",
            **_dense(48, 2048, 5120, 16, 2, 151936),
            **_GATED_DELTA,
            linear_num_value_heads=32,
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
            tie_word_embeddings=False,
        ),
    ),
    Published(
        "Jamba-v0.1",
        _config(
            "jamba",
            **_dense(32, 4096, 14336, 32, 8, 65536),
            attn_layer_offset=4,
            attn_layer_period=8,
            expert_layer_offset=1,
            expert_layer_period=2,
            num_experts=16,
            num_experts_per_tok=2,
            mamba_d_conv=4,
            mamba_d_state=16,
            mamba_dt_rank=256,
            mamba_expand=2,
            tie_word_embeddings=False,
        ),
    ),
    Published(
        "Nemotron-H-8B",
        _config(
            "nemotron_h",
            **_dense(52, 4096, 21504, 32, 8, 131072),
            hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            mamba_num_heads=128,
            mamba_head_dim=64,
            n_groups=8,
            ssm_state_size=128,
            conv_kernel=4,
            use_conv_bias=True,
            use_bias=False,
            mlp_bias=False,
            attention_bias=False,
            mamba_proj_bias=False,
            layer_norm_epsilon=1e-5,
            tie_word_embeddings=False,
        ),
        "8:64:affine",
    ),
    Published(
        "ERNIE-4.5-0.3B",
        _config(
            "ernie4_5",
            **_dense(18, 1024, 3072, 16, 2, 103424),
            head_dim=128,
            use_bias=False,
            tie_word_embeddings=True,
        ),
    ),
    Published(
        "ERNIE-4.5-21B-A3B",
        _config(
            "ernie4_5_moe",
            **_dense(28, 2560, 12288, 20, 4, 103424),
            use_bias=False,
            moe_num_experts=64,
            moe_k=6,
            moe_intermediate_size=1536,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_end_index=27,
            moe_layer_interval=1,
            tie_word_embeddings=True,
        ),
    ),
    Published(
        "Hunyuan-0.5B",
        _config(
            "hunyuan_v1_dense",
            **_dense(24, 1024, 3584, 16, 8, 120818),
            head_dim=128,
            attention_bias=False,
            use_qk_norm=True,
            tie_word_embeddings=True,
        ),
    ),
    Published(
        "(Kimi-K3)",
        _nested(
            "kimi_k3",
            _config(
                "kimi_linear",
                **_dense(93, 7168, 33792, 96, 96, 163840),
                q_lora_rank=1536,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                mla_use_output_gate=True,
                linear_attn_config={
                    "kda_layers": [layer for layer in range(1, 94) if layer % 4],
                    "num_heads": 96,
                    "head_dim": 128,
                    "short_conv_kernel_size": 4,
                    "use_full_rank_gate": True,
                },
                attn_res_block_size=12,
                num_experts=896,
                num_experts_per_token=16,
                num_shared_experts=2,
                moe_intermediate_size=3072,
                routed_expert_hidden_size=3584,
                latent_moe_use_norm=True,
                first_k_dense_replace=1,
                tie_word_embeddings=False,
            ),
        ),
        "4:32:mxfp4",
    ),
    Published(
        "Phi-3.5-MoE",
        _config(
            "phimoe",
            **_dense(32, 4096, 6400, 32, 8, 32064),
            num_local_experts=16,
            num_experts_per_tok=2,
            attention_bias=True,
            lm_head_bias=True,
            tie_word_embeddings=False,
        ),
    ),
    Published(
        "(K-EXAONE)",
        _config(
            "exaone_moe",
            **_dense(48, 6144, 18432, 64, 8, 153600),
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            num_shared_experts=1,
            moe_intermediate_size=2048,
            sliding_window=128,
            layer_types=([_SLIDING] * 3 + [_FULL]) * 12,
            is_moe_layer=[False] + [True] * 47,
            tie_word_embeddings=False,
        ),
    ),
)
"""At least one for every family."""
