"""A Llama-architecture GGUF file's settings and weights in hub naming and layout."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from mlxcel.checkpoint.gguf import GgufFile
from mlxcel.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import mlx.core as mx

GROUP_SIZE = 32
"""Elements that share a scale in every quantized GGUF type that MLX reads."""

_TYPE_BITS = {"F32": None, "F16": None, "Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)")


def llama_config(gguf: GgufFile) -> dict[str, Any]:
    """The ``config.json`` of the model in ``gguf``, with its quantization.

    Raises:
        UnsupportedError: Another architecture, a variation of it or a tensor type that cannot
            be imported, named in the error.
        CheckpointError: Settings or tensors are missing.
    """
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedError(
            f"{gguf.path} holds the architecture {architecture!r}.",
            "Only llama GGUF files can be imported.",
        )
    heads = _setting(gguf, "attention.head_count", int)
    hidden = _setting(gguf, "embedding_length", int)
    head_dim = _setting(gguf, "attention.key_length", int, hidden // max(heads, 1))
    if heads < 1 or head_dim < 2 or head_dim % 2:
        raise _missing(gguf, "heads of an even size")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _setting(gguf, "feed_forward_length", int),
        "num_hidden_layers": _setting(gguf, "block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": _setting(gguf, "attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": _setting(gguf, "context_length", int),
        "rms_norm_eps": _shortest(_setting(gguf, "attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(_setting(gguf, "rope.freq_base", float, 10000.0)),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": False,
        "mlp_bias": False,
    }
    for variation, plain in {
        "expert_count": 0,
        "rope.scaling.type": "none",
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
    }.items():
        if (found := gguf.metadata.get(f"llama.{variation}", plain)) != plain:
            raise UnsupportedError(
                f"{gguf.path} has llama.{variation} = {found!r}.",
                f"Only llama models with {plain!r} there can be imported.",
            )
    modules = _modules(gguf, config["num_hidden_layers"])
    _check_shapes(gguf, modules, config)
    bits = {
        module: _TYPE_BITS[gguf.tensors[f"{name}.weight"].type] for name, module in modules.items()
    }
    if quantization := _quantization(bits):
        config["quantization"] = quantization
    return config


def llama_weights(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, mx.array]:
    """The tensors of ``gguf`` under the names and in the row order of the hub's llama.

    Quantized tensors are ``weight`` (packed uint32), ``scales`` and ``biases`` (float16); the
    rest keeps its type. ``config`` comes from :func:`llama_config`, which has checked the file.

    Raises:
        CheckpointError: MLX cannot load the file.
    """
    import mlx.core as mx

    try:
        arrays = mx.load(str(gguf.path))
    except RuntimeError as error:
        raise CheckpointError(
            gguf.path, f"cannot be loaded ({error}).", "Use another GGUF file of the model."
        ) from error
    assert isinstance(arrays, dict)
    weights = {}
    for name, module in _modules(gguf, config["num_hidden_layers"]).items():
        for part in ("weight", "scales", "biases"):
            if (array := arrays.pop(f"{name}.{part}", None)) is None:
                continue
            if name.endswith((".attn_q", ".attn_k")):
                array = array[_half_split_rows(array.shape[0], config["head_dim"])]
            weights[f"{module}.{part}"] = array
    return weights


def _half_split_rows(rows: int, head_dim: int) -> mx.array:
    """Where each row of the hub's q or k projection stands in GGUF, (rows,).

    The hub rotates dimension i of a head together with i + head_dim / 2, GGUF with its
    neighbour: there a head's rows are the pairs (0, head_dim / 2), (1, head_dim / 2 + 1), …
    """
    import mlx.core as mx

    pairs = mx.arange(rows).reshape(-1, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def _modules(gguf: GgufFile, layers: int) -> dict[str, str]:
    """GGUF name to hub name of every module, each with a ``.weight`` that can be imported."""
    modules = {}
    for tensor in gguf.tensors.values():
        name, _, part = tensor.name.rpartition(".")
        if name in _MODULES:
            module = _MODULES[name]
        elif (
            (match := _LAYER_NAME.fullmatch(name))
            and match[2] in _LAYER_MODULES
            and int(match[1]) < layers
        ):
            module = f"model.layers.{int(match[1])}.{_LAYER_MODULES[match[2]]}"
        else:
            part = ""
        if part != "weight":
            raise UnsupportedError(
                f"{gguf.path} holds the tensor {tensor.name}, which no plain llama has.",
                "Only plain llama models can be imported.",
            )
        if tensor.type not in _TYPE_BITS:
            raise UnsupportedError(
                f"{gguf.path} stores {tensor.name} as {tensor.type}.",
                f"Use a file with {', '.join(_TYPE_BITS)} tensors only.",
            )
        modules[name] = module
    in_layers = (f"blk.{layer}.{name}" for layer in range(layers) for name in _LAYER_MODULES)
    for name in chain(("token_embd", "output_norm"), in_layers):
        if name not in modules:
            raise _missing(gguf, f"the tensor {name}.weight")
    return modules


def _check_shapes(gguf: GgufFile, modules: Iterable[str], config: Mapping[str, Any]) -> None:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    vocabulary = gguf.tensors["token_embd.weight"].shape[0]
    wanted = {
        **dict.fromkeys(("token_embd", "output"), (vocabulary, hidden)),
        **dict.fromkeys(("output_norm", "attn_norm", "ffn_norm"), (hidden,)),
        "attn_q": (queries, hidden),
        **dict.fromkeys(("attn_k", "attn_v"), (keys, hidden)),
        "attn_output": (hidden, queries),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (inner, hidden)),
        "ffn_down": (hidden, inner),
    }
    for name in modules:
        shape = gguf.tensors[f"{name}.weight"].shape
        if shape != wanted[name.rpartition(".")[2]]:
            raise _missing(gguf, f"a {name}.weight that fits its settings: the shape is {shape}")


def _quantization(bits: dict[str, int | None]) -> dict[str, Any] | None:
    """The ``quantization`` object: the commonest bits, and every module that differs."""
    common = Counter(b for b in bits.values() if b is not None).most_common(1)
    if not common:
        return None
    default = common[0][0]
    overrides: dict[str, Any] = {
        module: b is not None and {"group_size": GROUP_SIZE, "bits": b}
        for module, b in bits.items()
        if b != default and not module.endswith("norm")
    }
    return {"group_size": GROUP_SIZE, "bits": default, "mode": "affine", **overrides}


def _setting(gguf: GgufFile, key: str, kind: type, default: Any = None) -> Any:
    value = gguf.metadata.get(f"llama.{key}", default)
    if type(value) is not kind:
        raise _missing(gguf, f"llama.{key} as {kind.__name__}")
    return value


def _shortest(value: float) -> float:
    """The number with the fewest digits that is the same in float32: 1e-05, not 9.99999975e-06."""
    single = struct.pack("<f", value)
    digits = (float(f"{value:.{n}g}") for n in range(1, 10))
    return next((short for short in digits if struct.pack("<f", short) == single), value)


def _missing(gguf: GgufFile, what: str) -> CheckpointError:
    return CheckpointError(gguf.path, f"lacks {what}.", "Use another GGUF file of the model.")
