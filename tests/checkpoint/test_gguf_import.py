import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from mlxcel.checkpoint.checkpoint import open_checkpoint
from mlxcel.checkpoint.gguf_import import import_gguf, import_origin
from mlxcel.checkpoint.quantization import Quantization
from mlxcel.cli import import_gguf as command
from mlxcel.errors import CheckpointError, MlxcelError, UnsupportedError, UsageError

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 16, 64, 96, 2
SPECIAL = ["<|bos|>", "<|end|>"]
TOKENS = [
    *SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    "he",
    "12",
    "123",
    "1234",
    "<own>",
]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.rope.freq_base": 5e5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TOKENS) - 3), 4],
    "tokenizer.ggml.merges": ["h e", "1 2", "12 3", "123 4"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
Tensors = dict[str, tuple[np.ndarray, str]]


def llama(kind: str = "F32", embedding: str = "F32", head: bool = False) -> Tensors:
    """Random weights under GGUF's names; norms are float32 as they always are there."""
    draw = np.random.default_rng(0)

    def weight(rows: int, columns: int, kind: str) -> tuple[np.ndarray, str]:
        return draw.normal(size=(rows, columns)).astype("f4"), kind

    norm = (np.ones(HIDDEN, "f4"), "F32")
    vocabulary = len(TOKENS)
    tensors = {
        "token_embd.weight": weight(vocabulary, HIDDEN, embedding),
        "output_norm.weight": norm,
    }
    if head:
        tensors["output.weight"] = weight(vocabulary, HIDDEN, kind)
    for layer in range(LAYERS):
        blk = f"blk.{layer}"
        tensors |= {
            f"{blk}.attn_norm.weight": norm,
            f"{blk}.ffn_norm.weight": norm,
            f"{blk}.attn_q.weight": weight(HEADS * HEAD_DIM, HIDDEN, kind),
            f"{blk}.attn_k.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN, kind),
            f"{blk}.attn_v.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN, kind),
            f"{blk}.attn_output.weight": weight(HIDDEN, HEADS * HEAD_DIM, kind),
            f"{blk}.ffn_gate.weight": weight(INNER, HIDDEN, kind),
            f"{blk}.ffn_up.weight": weight(INNER, HIDDEN, kind),
            f"{blk}.ffn_down.weight": weight(HIDDEN, INNER, kind),
        }
    return tensors


Import = Callable[..., Path]


@pytest.fixture
def imported(tmp_path: Path, write_gguf: Callable[..., Path]) -> Import:
    """Imports a GGUF file with some metadata changed (None: left out) and gives the folder."""

    def run(tensors: Tensors | None = None, changes: Mapping[str, Any] | None = None) -> Path:
        metadata = {k: v for k, v in {**METADATA, **(changes or {})}.items() if v is not None}
        file = write_gguf(tmp_path / "m.gguf", metadata, llama() if tensors is None else tensors)
        import_gguf(file, tmp_path / "model")
        return tmp_path / "model"

    return run


def rotated_scores(queries: mx.array, keys: mx.array, traditional: bool) -> mx.array:
    """Attention scores of rotated heads, (heads, positions, positions)."""

    def rotate(x: mx.array) -> mx.array:
        heads = x.reshape(x.shape[0], -1, HEAD_DIM).swapaxes(0, 1)
        return mx.fast.rope(
            heads[None], HEAD_DIM, traditional=traditional, base=5e5, scale=1.0, offset=3
        )[0]

    return rotate(queries) @ mx.repeat(rotate(keys), HEADS // KV_HEADS, 0).swapaxes(1, 2)


def test_rows_are_put_back_for_half_split_rotation(imported: Import) -> None:
    """Imported q and k give under half-split rotation what GGUF's give under interleaved."""
    tensors = llama()
    weights = mx.load(str(imported(tensors) / "model.safetensors"))
    x = mx.random.normal((5, HIDDEN), key=mx.random.key(1))
    q, k = (mx.array(tensors[f"blk.1.attn_{n}.weight"][0]) for n in "qk")
    own_q, own_k = (weights[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qk")
    expected = rotated_scores(x @ q.T, x @ k.T, traditional=True)
    assert mx.allclose(
        rotated_scores(x @ own_q.T, x @ own_k.T, traditional=False), expected, atol=1e-3
    )
    assert not mx.allclose(rotated_scores(x @ q.T, x @ k.T, traditional=False), expected, atol=1e-3)


def test_other_tensors_are_only_renamed(imported: Import) -> None:
    """Everything but q and k keeps its values and its type under the hub's name."""
    tensors = llama("F16", head=True)
    weights = mx.load(str(imported(tensors) / "model.safetensors"))
    for name, own in {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "output_norm": "model.norm",
        "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
        "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm",
    }.items():
        array, kind = tensors[f"{name}.weight"]
        expected = mx.array(array.astype({"F32": "f4", "F16": "f2"}[kind]))
        assert weights[f"{own}.weight"].dtype == expected.dtype
        assert mx.array_equal(weights[f"{own}.weight"], expected)
    assert len(weights) == len(tensors)


def test_quantized_tensors(imported: Import) -> None:
    """Packed tensors keep scales and biases, rows included, and config.json tells their bits."""
    tensors = llama("Q4_1", embedding="Q8_0")
    tensors["blk.1.ffn_up.weight"] = (tensors["blk.1.ffn_up.weight"][0], "F16")
    folder = imported(tensors)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.for_path("model.layers.0.mlp.up_proj") == Quantization(32, 4)
    assert checkpoint.quantization.for_path("model.layers.1.mlp.up_proj") is None
    assert checkpoint.quantization.for_path("model.embed_tokens") == Quantization(32, 8)
    weights = mx.load(str(folder / "model.safetensors"))

    def unpacked(module: str, bits: int) -> mx.array:
        parts = (weights[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
        return mx.dequantize(*parts, group_size=32, bits=bits).astype(mx.float32)

    table = mx.array(tensors["token_embd.weight"][0])
    assert mx.abs(unpacked("model.embed_tokens", 8) - table).max().item() < 0.03
    rows = np.arange(HEADS * HEAD_DIM).reshape(HEADS, HEAD_DIM // 2, 2)
    half_split = np.concatenate([rows[..., 0], rows[..., 1]], axis=1).reshape(-1)
    q = mx.array(tensors["blk.0.attn_q.weight"][0][half_split])
    assert mx.abs(unpacked("model.layers.0.self_attn.q_proj", 4) - q).max().item() < 0.3


def test_mlx_lm_loads_it(imported: Import) -> None:
    """mlx-lm finds every parameter it expects, mixed bits included, and no other."""
    from mlx_lm.utils import load_model

    model, config = load_model(imported(llama("Q4_1", embedding="Q8_0")), strict=True)
    assert config["vocab_size"] == len(TOKENS)
    assert model(mx.array([[2, 3, 4]])).shape == (1, 3, len(TOKENS))


def test_settings(imported: Import) -> None:
    """config.json and generation_config.json carry the settings, floats as people write them."""
    folder = imported()
    config = open_checkpoint(folder).config
    assert config.model_type == "llama"
    assert config.num_layers == LAYERS
    assert config.eos_token_ids == (1,)
    wanted = {
        "head_dim": HEAD_DIM,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
    }
    assert {key: config.get(key) for key in wanted} == wanted
    assert "quantization" not in config.raw
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 1}


def test_untied_head(imported: Import) -> None:
    """A file with an output projection of its own is not tied."""
    assert open_checkpoint(imported(llama(head=True))).config.get("tie_word_embeddings") is False


@pytest.mark.parametrize(
    ("pre", "numbers", "first"),
    [
        ("smollm", ["1", "2", "3", "4"], None),
        ("gpt-2", ["1234"], None),
        ("llama-bpe", ["123", "4"], "<|bos|>"),
    ],
)
def test_tokenizer(imported: Import, pre: str, numbers: list[str], first: str | None) -> None:
    """Each pre-tokenizer splits numbers its way, specials stay whole, and text comes back."""
    tokenizer = Tokenizer.from_file(
        str(imported(changes={"tokenizer.ggml.pre": pre}) / "tokenizer.json")
    )
    start = [first] if first else []
    assert tokenizer.encode("1234").tokens == start + numbers
    assert tokenizer.encode("he<|end|><own>").tokens == [*start, "he", "<|end|>", "<own>"]
    text = "hé, 日本 🎉\n 12"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode([1, 2]) == tokenizer.decode([2])


def test_tokenizer_config(imported: Import) -> None:
    """tokenizer_config.json names the special tokens and holds the chat template."""
    config = json.loads((imported() / "tokenizer_config.json").read_text())
    assert config["chat_template"] == METADATA["tokenizer.chat_template"]
    assert (config["bos_token"], config["eos_token"]) == ("<|bos|>", "<|end|>")
    assert "pad_token" not in config


@pytest.mark.parametrize(
    ("changes", "error", "what"),
    [
        ({"general.architecture": "qwen2"}, UnsupportedError, "'qwen2'"),
        ({"general.architecture": None}, UnsupportedError, "None"),
        ({"llama.expert_count": 8}, UnsupportedError, "expert_count = 8"),
        ({"llama.rope.scaling.type": "yarn"}, UnsupportedError, "'yarn'"),
        ({"llama.rope.dimension_count": 8}, UnsupportedError, "dimension_count = 8"),
        ({"tokenizer.ggml.model": "llama"}, UnsupportedError, "'llama'"),
        ({"tokenizer.ggml.pre": "qwen2"}, UnsupportedError, "'qwen2'.*Known are gpt-2"),
        ({"tokenizer.ggml.pre": None}, UnsupportedError, "pre-tokenizer None"),
        ({"llama.block_count": None}, CheckpointError, "llama.block_count as int"),
        ({"llama.block_count": "2"}, CheckpointError, "llama.block_count as int"),
        ({"llama.block_count": 2**32 - 1}, CheckpointError, r"blk\.2\.attn_norm"),
        ({"llama.block_count": 1}, UnsupportedError, r"blk\.1\."),
        ({"llama.attention.head_count": 0}, CheckpointError, "even size"),
        ({"llama.embedding_length": 128}, CheckpointError, "fits its settings"),
        ({"tokenizer.ggml.merges": ["h zz"]}, CheckpointError, "merges do not fit"),
        ({"tokenizer.ggml.merges": ["h"]}, CheckpointError, "merges do not fit"),
        ({"tokenizer.ggml.token_type": [1, 1]}, CheckpointError, "match their types"),
        ({"tokenizer.ggml.tokens": [1, 2]}, CheckpointError, "tokens is missing"),
        ({"tokenizer.ggml.eos_token_id": 9999}, CheckpointError, "eos_token_id is 9999"),
        (
            {"tokenizer.ggml.tokens": TOKENS[:-1], "tokenizer.ggml.token_type": [3] * 262},
            CheckpointError,
            "embeds 263",
        ),
    ],
)
def test_refused_metadata(
    imported: Import, tmp_path: Path, changes: dict[str, Any], error: type[MlxcelError], what: str
) -> None:
    """What cannot be imported is refused by name, and nothing is left behind."""
    with pytest.raises(error, match=what):
        imported(changes=changes)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("name", "tensor", "what"),
    [
        ("blk.0.attn_q.weight", (np.ones((64, 256)), "Q6_K"), "as Q6_K"),
        ("rope_freqs.weight", (np.ones(8), "F32"), "rope_freqs"),
        ("blk.0.attn_q.bias", (np.ones(64), "F32"), r"attn_q\.bias"),
        ("blk.0.ffn_gate_exps.weight", (np.ones((2, 8, 8)), "F32"), "ffn_gate_exps"),
    ],
)
def test_refused_tensors(imported: Import, name: str, tensor: Any, what: str) -> None:
    """Tensor types that MLX does not read, and tensors that no plain llama has, are named."""
    with pytest.raises(UnsupportedError, match=what):
        imported({**llama(), name: tensor})


def test_replaces_only_imports(imported: Import, tmp_path: Path) -> None:
    """An earlier import is replaced as a whole; any other folder with content is refused."""
    folder = imported()
    assert import_origin(folder) == "m.gguf"
    (folder / "left-over").touch()
    assert not (imported() / "left-over").exists()
    (folder / "gguf_import.json").unlink()
    with pytest.raises(UsageError, match="no earlier import"):
        imported()
    assert import_origin(folder) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "model"]


def test_never_deletes_its_source(imported: Import) -> None:
    """A source inside the folder that would be replaced is refused."""
    folder = imported()
    source = (folder.parent / "m.gguf").rename(folder / "m.gguf")
    with pytest.raises(UsageError, match="lies inside"):
        import_gguf(source, folder)
    assert source.exists()


def test_command(
    tmp_path: Path, write_gguf: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """`import-gguf SRC DIR` makes DIR, also where its parents do not exist yet."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    source = write_gguf(tmp_path / "m.gguf", METADATA, llama())
    args = parser.parse_args(["import-gguf", str(source), str(tmp_path / "a" / "b")])
    assert args.run(args) == 0
    assert str(tmp_path / "a" / "b") in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "a" / "b").config.num_layers == LAYERS
